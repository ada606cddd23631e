"""rollouts/step_N.jsonl: text and per-token facts of real blocks, the last tokens of long ones, and what is lost."""

import json

import numpy as np
import pytest

from shmrl import Arena, Branch, encode
from shmrl.monitor import rollouts
from shmrl.payload.shown import TOKENS, shown
from shmrl.types import EpisodeResult


@pytest.fixture
def arena():
    with Arena.create(capacity="16MiB") as arena:
        yield arena
        arena.unlink()


def branch(T=6, first=3, experts=4, **more):
    sampled = np.arange(T) >= first
    routing = np.stack([np.arange(T - 1) % experts, np.arange(1, T) % experts], axis=-1)[:, None, :].repeat(2, axis=1)
    return Branch(
        np.arange(100, 100 + T),
        sampled,
        np.where(sampled, -0.25, 0).astype(np.float32),
        routing=routing,  # [T - 1, 2, 2]: every token goes to two neighbours
        num_experts=experts,
        layers=[1, 3],
        mask=(np.concatenate([[100 + t, 7] for t in range(first, T)]), np.where(sampled, 2, 0)),
        **more,
    )


def written(arena, directory, *samples, step=3):
    result = EpisodeResult(True, "t7", reward=0.5, rewards={"lcs": 0.5}, stop_reason="stop", num_turns=1)
    rollouts.write_rollouts(
        directory, step, [("words", result, 0.1, sample, shown(arena, sample)) for sample in samples]
    )
    return [json.loads(line) for line in (directory / f"step_{step}.jsonl").read_text().splitlines()]


def test_text_and_every_tokens_facts(arena, tmp_path):
    messages = [{"role": "user", "content": "<script>alert(1)</script>"}]
    sample = encode(arena, branch(messages=messages), tag="run/words/g/0")
    (row,) = written(arena, tmp_path, sample)
    assert (row["source"], row["task_id"], row["reward"], row["advantage"]) == ("words", "t7", 0.5, 0.1)
    assert row["messages"] == messages
    facts = row["per_token"]
    assert facts["start"] == 0
    assert facts["ids"] == [100, 101, 102, 103, 104, 105]
    assert facts["sampled"] == [0, 0, 0, 1, 1, 1]
    assert facts["logprobs"] == [0, 0, 0, -0.25, -0.25, -0.25]
    assert facts["mask"] == [0, 0, 0, 2, 2, 2]
    assert facts["layers"] == [1, 3]
    assert facts["expert_load"] == [[3, 3, 2, 2], [3, 3, 2, 2]]  # of 5 rows x 2 choices; balanced is 2.5
    assert facts["load"] == [1.2, 1.0, 0.8, 1.0, 1.2, 0.0]  # the last token was never fed
    arena.free(sample.handles)


def test_of_a_long_episode_only_the_last_tokens(arena, tmp_path):
    T = TOKENS + 500
    samples = [
        encode(arena, branch(T, first=T - 10), tag="run/words/g/0"),
        encode(arena, branch(), tag="run/words/g/1"),
    ]
    long, short = (row["per_token"] for row in written(arena, tmp_path, *samples))
    assert (long["start"], len(long["ids"]), long["ids"][-1]) == (500, TOKENS, 100 + T - 1)
    assert long["sampled"] == [0] * (TOKENS - 10) + [1] * 10
    assert long["mask"][-10:] == [2] * 10
    assert (short["start"], len(short["ids"])) == (0, 6)
    for sample in samples:
        arena.free(sample.handles)


def test_what_was_not_captured_is_none_and_a_lost_block_leaves_the_rest(arena, tmp_path):
    plain = encode(arena, Branch([1, 2], [0, 1], [0, -1.0]), tag="run/words/g/0")
    lost = encode(arena, branch(), tag="run/words/g/1")
    arena.free(lost.handles)
    kept, gone = written(arena, tmp_path, plain, lost)
    assert [kept["per_token"][key] for key in ("mask", "load", "expert_load", "layers")] == [None] * 4
    assert kept["per_token"]["logprobs"] == [0, -1.0]
    assert (gone["per_token"], gone["messages"], gone["tokens"]) == (None, None, 6)
    arena.free(plain.handles)
