"""Byte identity: what the engine returned is what every rank assembles, through real sockets, arena and two ranks.

The engine's arrays are pure functions of (seed, version, token, position), so each assembled row can be computed here
from the row's own token and position and compared.
"""

import asyncio
import json

import numpy as np
import pytest

from tests.support.fake_engine import FakeEngine, Oracle
from tests.support.runs import with_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SEQ_LEN, LONG, HEAD, STEPS = 384, 360, 6, 3
ORACLE = Oracle(seed=5, layers=2, experts=4, stop_every=11)

CONFIG = f"""
[run]
name = "bytes"
max_steps = {STEPS}
[arena]
capacity = "64MiB"
verify = true
[inference]
max_model_len = 1024
[orchestrator]
batch_size = 24
group_size = 2
seq_len = {SEQ_LEN}
max_off_policy_steps = 0
filters.zero_advantage = false
[[orchestrator.train.source]]
name = "shapes"
env = {{ id = "tests.support.shapes_env:Shapes", args = {{ long = {LONG} }} }}
sampling = {{ top_p = 0.9, top_k = 64, max_tokens = 24 }}
serve.pool = {{ kind = "static", workers = 2 }}
[trainer]
ranks = 2
head = {HEAD}
pad_to_multiple_of = 16
loss = {{ kind = "custom", path = "tests.support.observe:record", args = {{ directory = "SEEN" }} }}
"""


class Engine(FakeEngine):
    """Counts the replies it cut off half-way; each of them has to be resumed by the env worker."""

    aborts = 0

    def choice(self, prompt, sampling, abort=False):
        answer = super().choice(prompt, sampling, abort)
        self.aborts += answer["finish_reason"] == "abort"
        return answer


async def test_every_row_that_every_rank_assembles_is_the_engines(run, tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    async with Engine(ORACLE, abort_every=3) as engine:
        one = run(text=with_model(CONFIG.replace("SEEN", str(seen)), engine)).start()
        code, output = await asyncio.to_thread(one.finish, 200)
        assert code == 0, output
        assert engine.aborts >= STEPS
    one.assert_nothing_left()
    batches = [_load(path) for path in sorted(seen.iterdir())]
    assert {(b["step"], b["rank"]) for b in batches} == {(s, r) for s in range(1, STEPS + 1) for r in range(2)}
    assert max(len(b["seq_lens"]) for b in batches) >= 3, "no micro batch had three samples"
    checked = np.sum([_check(batch) for batch in batches], axis=0)
    sequences, cut, branches, turns, sampled = checked.tolist()
    assert sequences >= STEPS * 24
    assert cut >= STEPS, "no episode was cut by count"
    assert branches >= STEPS, "no episode had a second branch"
    assert turns >= STEPS, "no episode had three turns"
    assert sampled > 500
    assert [line["payload/dropped_micro_batches"] for line in one.metrics() if line["step"]] == [0] * STEPS


def _load(path):
    with np.load(path) as file:
        batch = {key: file[key] for key in file.files}
    step, rank, _ = path.stem.split("-")
    return {**batch, "step": int(step[4:]), "rank": int(rank[4:]), "meta": json.loads(str(batch["meta"]))}


def _check(batch):
    """Compare every row; (sequences, cut ones, second branches, those of three turns, sampled tokens)."""
    counts = np.zeros(5, np.int64)
    starts = np.concatenate([[0], np.cumsum(batch["seq_lens"])]).tolist()
    version = batch["step"] - 1  # strictly on-policy: nothing else was ever served
    for first, length, meta in zip(starts, batch["seq_lens"].tolist(), batch["meta"], strict=False):
        assert (meta["version_start"], meta["version_end"]) == (version, version)
        rows = slice(first, first + length)
        drawn = np.flatnonzero(batch["loss_mask"][rows])
        cut = length == SEQ_LEN
        _check_fed(batch, version, rows, fed=length if cut else length - 1)
        _check_sampled(batch, version, rows, drawn)
        replies = 1 + np.count_nonzero(np.diff(drawn) > 1) if len(drawn) else 0
        counts += (1, cut, meta.get("branch", 0) > 0, replies >= 3, len(drawn))
    return counts


def _check_fed(batch, version, rows, fed):
    """Positions, and routing where a token was fed: everywhere but at the last token of an uncut sequence."""
    length = rows.stop - rows.start
    tokens, positions = batch["tokens"][rows], batch["positions"][rows]
    assert positions.tolist() == list(range(length))
    assert batch["routing_covered"][rows].tolist() == [True] * fed + [False] * (length - fed)
    assert np.array_equal(batch["routing"][rows][:fed], ORACLE.routing(version, tokens[:fed], positions[:fed]))


def _check_sampled(batch, version, rows, drawn):
    """Log-probabilities, heads and kept sets: the engine's at sampled positions, nothing elsewhere."""
    first, length = rows.start, rows.stop - rows.start
    tokens = batch["tokens"][first + drawn]
    logprobs = np.zeros(length, np.float32)
    logprobs[drawn] = ORACLE.logprobs(version, tokens, drawn)
    assert batch["logprobs"][rows].tobytes() == logprobs.tobytes()
    ids, values = ORACLE.head(version, tokens, drawn, HEAD)
    assert np.array_equal(batch["head_ids"][first + drawn], ids)
    assert batch["head_logprobs"][first + drawn].tobytes() == values.tobytes()
    assert np.flatnonzero(batch["head_covered"][rows]).tolist() == drawn.tolist()
    kept = {int(at): ORACLE.kept(version, int(token), int(at)) for token, at in zip(tokens, drawn, strict=True)}
    ends = np.cumsum(batch["mask_counts"])[rows].tolist()
    for at, (end, count) in enumerate(zip(ends, batch["mask_counts"][rows].tolist(), strict=True)):
        assert batch["mask_ids"][end - count : end].tolist() == kept.get(at, [])
