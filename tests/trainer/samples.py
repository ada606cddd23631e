"""Branches as samples in a real arena: encoded, packed, shipped and retired as the orchestrator does it."""

import dataclasses

from shmrl.payload import Branch, encode, pack


def put(arena, branches, *, advantage=lambda index: (-1.0) ** index * (1 + index / 8)):
    """Encode branches and give each sample an advantage."""
    return [
        dataclasses.replace(encode(arena, branch, tag=f"run/bench/g/{index}"), advantage=advantage(index))
        for index, branch in enumerate(branches)
    ]


def ship(arena, samples, *, ranks, seq_len=96, step=1, readers=None):
    """Pack samples for `ranks` and ship their blocks to them and to the ledger. -> list of micro batches per rank"""
    packed = pack(samples, seq_len=seq_len, num_ranks=ranks)
    handles = dict.fromkeys(h for sample in samples for h in sample.handles)
    arena.ship(list(handles), readers=readers or 2, step=step)
    return packed


def retire(arena, samples, ranks):
    """What the ledger does when a step is durable."""
    arena.done([h for sample in samples for h in sample.handles], reader=ranks)


def bare(branch, *, routing=True):
    """The same branch without head and mask, and without routing when asked."""
    meta = {key: value for key, value in branch.meta.items() if key not in ("top_p", "top_k", "min_p")}
    routes = {"routing": branch.rows["routing"].values, "num_experts": branch.num_experts} if routing else {}
    return Branch(branch.tokens, branch.loss_mask, branch.logprobs, meta=meta, **routes)
