"""The command line and environment of a vLLM server, and what of `[inference]` cannot be."""

from itertools import pairwise
from pathlib import Path

import pytest

from shmrl.config import load_run
from shmrl.errors import ConfigError
from shmrl.inference.vllm.launch import PLUGIN, arguments, checked_plan, command, environment
from shmrl.inference.vllm.versions import Installed, Plan

ROOT = Path(__file__).parents[3]
CPU = Installed("0.30.0", "cpu", triton=False)


@pytest.fixture
def load(tmp_path):
    def build(**flags):
        given = {"run.output-dir": str(tmp_path / "out"), **{k.replace("__", "."): v for k, v in flags.items()}}
        return load_run([ROOT / "configs" / "vllm-tiny.toml"], given)

    return build


def test_arguments_pass_through():
    options = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "enable-prefix-caching": False,
        "override_generation_config": {"a": 1},
        "middleware": ["a", "b"],
        "gpu_memory_utilization": 0.5,
    }
    expected = "--tensor-parallel-size 2 --enforce-eager --no-enable-prefix-caching"
    assert list(arguments(options)) == [
        *expected.split(),
        *("--override-generation-config", '{"a": 1}'),
        *("--middleware", "a", "b", "--gpu-memory-utilization", "0.5"),
    ]


def test_the_server_serves_what_the_trainer_declares(load):
    tree = load(inference__python="/opt/vllm/bin/python", inference__vllm__swap_space="4")
    argv = command(tree, Path("/models/m"), Plan("v1", "derived"))
    assert argv[:3] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(pairwise(argv))
    assert (pairs["--model"], pairs["--served-model-name"]) == ("/models/m", "policy")
    assert (pairs["--max-logprobs"], pairs["--logprobs-mode"]) == ("64", "processed_logprobs")
    assert (pairs["--swap-space"], pairs["--generation-config"]) == ("4", "vllm")
    assert {"--enable-return-routed-experts", "--enforce-eager", "--enable-scale-out"} <= set(argv)
    assert "--return-sampling-mask" not in argv
    dense = load(trainer__router_replay="false")
    argv = command(dense, Path("/models/m"), Plan("v2", "native"))
    assert "--return-sampling-mask" in argv
    assert "--enable-return-routed-experts" not in argv


def test_the_environment_brings_our_worker_extension_and_keeps_the_rest(load):
    got = environment(load(), Plan("v1", "derived"), {"PYTHONPATH": "/mine", "VLLM_CPU_KVCACHE_SPACE": "8"})
    assert got["PYTHONPATH"] == f"{PLUGIN}:/mine"
    assert (got["VLLM_CPU_KVCACHE_SPACE"], got["VLLM_CPU_OMP_THREADS_BIND"]) == ("8", "nobind")
    assert (got["VLLM_USE_V2_MODEL_RUNNER"], got["VLLM_SERVER_DEV_MODE"]) == ("0", "1")
    gpu = environment(load(inference__device="cuda:3"), Plan(None, None), {})
    assert gpu["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_KVCACHE_SPACE"} & gpu.keys()


def test_masks_need_as_many_log_probabilities_as_top_k(load):
    source = "orchestrator__train__source__0__sampling__top_k"
    assert checked_plan(load(), CPU) == Plan("v1", "derived")
    with pytest.raises(ConfigError, match=r"top_k = 65 exceeds inference\.max_logprobs = 64: raise it to 65"):
        checked_plan(load(**{source: "65"}), CPU)


def test_the_device_must_be_the_one_vllm_was_built_for(load):
    with pytest.raises(ConfigError, match=r"inference\.device = 'cuda', but .* has a vLLM for 'cpu'"):
        checked_plan(load(inference__device="cuda:1"), CPU)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"inference__vllm__max_model_len": "8"},
            r"vllm\.max_model_len is set by shmrl, from inference\.max_model_len",
        ),
        (
            {"inference__vllm__worker_extension_cls": "x"},
            r"vllm\.worker_extension_cls is set by shmrl, from what it needs",
        ),
        ({"inference__urls": '["http://a:1"]'}, r"\[inference\.vllm\] are for an engine started here, and urls names"),
        ({"inference__backend": "embedded"}, r"\[inference\.vllm\]: only with backend = 'vllm'"),
        (
            {"inference__weight_transfer": "broadcast", "inference__colocate": "true"},
            r"'broadcast': only with backend = 'vllm', and without colocate",
        ),
    ],
)
def test_keys_that_cannot_be(load, flags, message):
    with pytest.raises(ConfigError, match=message):
        load(**flags)


def test_weights_go_through_shared_memory_only_where_the_engine_is_on_this_host(load, tmp_path):
    tree = load()
    shared = tree.shared_weights
    assert shared is not None
    assert tree.published_dir(3) == shared / "step_3"
    assert shared.parent == Path("/dev/shm")
    (tmp_path / "far.toml").write_text('[inference]\nbackend = "vllm"\nurls = ["http://node1:8000"]\n')
    far = load_run([ROOT / "configs" / "reverse-text.toml", tmp_path / "far.toml"], {})
    assert far.shared_weights is None
    assert far.published_dir(3) == far.weights_dir(3)
    sent = load_run(
        [ROOT / "configs" / "reverse-text.toml", tmp_path / "far.toml"], {"inference.weight-transfer": "broadcast"}
    )
    assert sent.published_dir(3) == sent.shared_weights / "step_3"  # rank 0 reads them there


def test_an_engine_starts_with_the_newest_version(load, tmp_path, monkeypatch):
    tree = load()
    assert tree.newest_weights == tree.initial_weights
    monkeypatch.setattr(type(tree), "shared_weights", tmp_path / "shm")
    for name in ("step_9", "step_10", ".step_11.tmp"):
        (tmp_path / "shm" / name).mkdir(parents=True)
    assert tree.newest_weights == tmp_path / "shm" / "step_10"
