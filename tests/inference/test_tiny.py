"""The model directory made on the spot."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from shmrl.config import TinyModel
from shmrl.errors import ConfigError
from shmrl.inference.embedded.tiny import main, write_tiny


def test_loads_in_transformers_with_the_asked_shape(tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("qwen3_moe", 4, 64)
    assert (config.num_experts, config.num_experts_per_tok, config.vocab_size) == (8, 2, 512)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [258, 260]


def test_weights_have_the_public_per_expert_layout(tiny_dir: Path) -> None:
    with safe_open(tiny_dir / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.3.mlp.experts.7.gate_proj.weight").get_shape() == [64, 64]
        assert len(list(file.keys())) == 135


@pytest.mark.parametrize("text", ["hello world", "  two  spaces\n\n", "zażółć gęślą jaźń 漢字 🙂", "a<|im_end|>b"])
def test_tokenizer_round_trips(tiny_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 261 for token in ids)
    assert len(ids) == len(text.replace("<|im_end|>", ".").encode())


def test_chat_template(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    said = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_writing_again_keeps_the_directory(tiny_dir: Path) -> None:
    before = (tiny_dir / "model.safetensors").stat()
    made_of = json.loads((tiny_dir / "tiny.json").read_text())
    write_tiny(TinyModel(**made_of["shape"]), tiny_dir, made_of["seed"])
    assert (tiny_dir / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ConfigError, match="'seed': 1"):
        write_tiny(TinyModel(**made_of["shape"]), tiny_dir, 1)
    assert [path.name for path in tiny_dir.parent.iterdir() if path.name.startswith(".")] == []


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    shape = TinyModel(layers=1)
    a, b, c = (write_tiny(shape, tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    weights = [(path / "model.safetensors").read_bytes() for path in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]


def test_command_writes_step_0_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(RUN.format(output_dir=tmp_path / "out"))
    assert main([str(toml)]) == 0
    assert json.loads((tmp_path / "out/weights/step_0/config.json").read_text())["num_hidden_layers"] == 1
    toml.write_text("nonsense = 1\n")
    assert (main([str(toml)]), main([])) == (2, 2)
    assert "nonsense" in capsys.readouterr().err


RUN = """
[run]
output_dir = "{output_dir}"
[model.tiny]
layers = 1
[orchestrator]
batch_size = 8
[[orchestrator.train.source]]
name = "reverse"
env.id = "reverse-text"
"""
