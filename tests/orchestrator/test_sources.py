"""What an episode is told of the engine."""

import pytest

from shmrl.config import load_run
from shmrl.env.model import ModelSpec
from shmrl.orchestrator.sources import Source
from tests.support.fake_vllm import run_on

REMOTE = "url = 'http://there:8000'\nmax_turns = 2"
SHARED = f"{REMOTE}\nargs.evaluation_sessions = 4"


def test_an_episode_asks_engines_as_the_run_is_configured(tmp_path):
    flags = {"inference__request_timeout_s": "7", "inference__logprobs_mode": "raw_logprobs"}
    flags |= {"trainer__sampling_replay": "false", "trainer__head": "4"}
    tree = run_on(tmp_path, "http://node1:8000", **flags)
    source = Source(tree, 0, client=None)
    source.derive_masks = True
    spec = ModelSpec.from_wire(source.model(3, "g"))
    assert (spec.urls, spec.timeout_s, spec.logprobs_mode) == (("http://node1:8000",), 7.0, "raw")
    assert (spec.fields, spec.head, spec.max_model_len, spec.derive_masks) == (("routing", "head"), 4, 64, True)
    assert spec.sampling["top_p"] == 0.95
    salts = {source.model(version, group)["cache_salt"] for version in (3, 4) for group in ("g", "h")}
    assert len(salts) == 4  # no prefix is taken over from other weights
    assert not any("/" in salt for salt in salts)  # vLLM takes none


@pytest.mark.parametrize(("env", "timeout_s"), [("id = 'reverse-text'", 300), (REMOTE, 64 * 300), (SHARED, 16 * 300)])
def test_evaluations_that_take_turns_have_the_time_for_it(tmp_path, env, timeout_s):
    file = tmp_path / "run.toml"
    file.write_text(
        "[model.tiny]\n[orchestrator]\nbatch_size = 8\n"
        "[[orchestrator.train.source]]\nname = 'words'\nenv.id = 'reverse-text'\n"
        f"[[orchestrator.eval.source]]\nname = 'held'\n[orchestrator.eval.source.env]\n{env}\n"
    )
    assert Source(load_run([file]), 1, client=None).timeout_s == timeout_s
