"""A run's tree on fake vLLM engines, with the model directory that the checks read."""

import json

import pytest

from shmrl.config import load_run
from tests.support.fake_vllm import FakeVllm

SHAPE = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
SIZES = {"vocab_size": 264, "max_position_embeddings": 1024}
TEXT = """
[inference]
backend = "vllm"
urls = []
max_model_len = 64
[orchestrator]
batch_size = 8
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
sampling = { top_p = 0.95, top_k = 8, max_tokens = 6 }
[trainer]
head = 4
"""


@pytest.fixture
def tree(tmp_path):
    """tree(*engines, config={...}, **flags): a run that generates through these engines."""

    def build(*engines, config=None, **flags):
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **SIZES, **(config or {})}))
        text = TEXT.replace("[]", json.dumps([engine.url for engine in engines])) + f'[model]\npath = "{tmp_path}"\n'
        (tmp_path / "run.toml").write_text(text)
        given = {"run.output-dir": str(tmp_path / "out"), **{k.replace("__", "."): v for k, v in flags.items()}}
        return load_run([tmp_path / "run.toml"], given)

    return build


@pytest.fixture
async def fake():
    """fake(**options): a FakeVllm that serves."""
    made = []

    async def start(**options):
        made.append(FakeVllm(**options))
        await made[-1].start()
        return made[-1]

    yield start
    for engine in made:
        await engine.stop()
