"""A run whose environment is somebody else's: sessions of a server that the run does not start."""

import pytest

from shmrl.env import resolve_env
from tests.support.runs import TINY

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

LOCAL = 'env = { id = "reverse-text", args = { min_length = 2, max_length = 4 } }'
EVAL = '[[orchestrator.eval.source]]\nname = "held"\ninterval = 2\nnum_examples = 4\nsampling.max_tokens = 6\n'


def test_it_trains_on_as_many_sessions_as_there_are(run, capfd):
    """max_inflight for training and one for evaluation, on a server with exactly as many: none is refused."""
    url, server = resolve_env("guess-number", max_concurrent_envs=17)
    with server:
        remote = f'env = {{ url = "{url}", max_turns = 2 }}'
        text = TINY.replace(LOCAL, remote).replace("[trainer]", f"{EVAL}{remote}\n[trainer]")
        sizes = {"inference.max-model-len": 256, "orchestrator.seq-len": 256, "orchestrator.max-inflight": 16}
        one = run(text=text, sources=2, **{"run.max-steps": 2, **sizes})
        code, output = one.start().finish(250)
        assert code == 0, output
        one.assert_nothing_left()
    last = one.metrics()[-1]
    assert (last["step"], last["episodes/failed"], last["eval/held/failed"], last["arena/blocks"]) == (2, 0, 0, 0)
    log = capfd.readouterr().err
    assert "opened (17 of 17)" in log
    assert "refused" not in log
