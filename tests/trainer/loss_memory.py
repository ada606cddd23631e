"""Run by test_logprobs in a process of its own: MiB that the loss takes on top of its inputs, with masks and heads.

Argument: JSON list of [tokens, vocabulary, chunk]. Prints a JSON list of the peaks.
"""

import json
import re
import sys
from pathlib import Path

import torch

from shmrl.trainer.logprobs import KeptSets, token_logprobs

HIDDEN, HEAD, KEPT = 64, 16, 8


def resident(which):
    """MiB: VmRSS now, VmHWM its peak since `restart`."""
    return int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def restart():
    Path("/proc/self/clear_refs").write_text("5")


def extra_peak(tokens, vocab, chunk):
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    heads = torch.randint(vocab, (tokens, HEAD))
    labels = heads[:, 0].clone()
    kept = KeptSets(heads[:, :KEPT].flatten(), torch.full((tokens,), KEPT))
    restart()
    before = resident("VmRSS")
    out = token_logprobs(hidden, weight, labels, head_ids=heads, kept=kept, chunk=chunk)
    (out.label.sum() + out.head[:, :KEPT].sum()).backward()
    assert hidden.grad.isfinite().all()
    return resident("VmHWM") - before


if __name__ == "__main__":
    extra_peak(256, 1024, 64)  # what torch allocates once
    print(json.dumps([extra_peak(*case) for case in json.loads(sys.argv[1])]))
