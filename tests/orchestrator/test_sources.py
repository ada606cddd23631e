"""What an episode is told of the engine."""

from shmrl.env.model import ModelSpec
from shmrl.orchestrator.sources import Source
from tests.support.fake_vllm import run_on


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
