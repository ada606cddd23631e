"""What passes through the orchestrator does not depend on how long episodes are: bytes on its sockets, its memory."""

import json

import pytest
from aiohttp import web

from tests.orchestrator.test_run import CONFIG, Site
from tests.support.fake_engine import FakeEngine, Oracle

pytestmark = pytest.mark.timeout(300)

SHORT, LONG = 100, 20_000
LAYERS, TOP_K, STEPS = 48, 8, 10
ROW_NBYTES = LAYERS * TOP_K


class Repeating(FakeEngine):
    """Says the same to every prompt of a length, so that an answer of megabytes is made once and sent as it is."""

    def __init__(self, tokens):
        super().__init__(Oracle(layers=LAYERS, top_k=TOP_K, experts=64, stop_every=0))
        self.tokens, self._answers = tokens, {}

    async def _generate(self, request):
        body = await request.json()
        length = len(body["token_ids"])
        if length not in self._answers:
            sampling = body["sampling_params"] | {"max_tokens": self.tokens - length, "top_k": -1, "logprobs": 0}
            self._answers[length] = json.dumps({"choices": [self.choice([1] * length, sampling)]}).encode()
        label = f'"version": "{self.version}"'.encode()
        return web.Response(
            body=self._answers[length].replace(b'"version": "0"', label), content_type="application/json"
        )


async def _run(directory, model_dir, tokens, steps):
    """Metrics of a run whose episodes have about `tokens` tokens each."""
    text = CONFIG.replace("batch_size = 8", "batch_size = 16").replace(
        "top_p = 0.95, top_k = 32, max_tokens = 8", f"max_tokens = {tokens}"
    )
    text = text.replace("max_model_len = 256", f"max_model_len = {2 * LONG}").replace(
        "seq_len = 256", f"seq_len = {LONG}"
    )
    directory.mkdir()
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_experts": 64, "num_experts_per_tok": TOP_K}
    model = directory / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    async with (
        Repeating(tokens) as engine,
        Site(directory, model, engine, text, "512MiB", run__max_steps=str(steps), trainer__head="0") as site,
    ):
        code, output = await site.orchestrate()
        assert code == 0, output
        stats = site.arena.stats()
        assert (stats["blocks"], stats["created"]) == (0, stats["freed"])
        shipped = sum(len(line["lags"]) for rank in range(2) for line in site.lines(f"rank_{rank}.jsonl"))
        return site.lines("metrics.jsonl"), shipped


async def test_bytes_per_sample_and_memory_do_not_depend_on_the_length(tmp_path, model_dir):
    short, _ = await _run(tmp_path / "short", model_dir, SHORT, STEPS)
    long, shipped = await _run(tmp_path / "long", model_dir, LONG, STEPS)
    assert shipped * (LONG - 100) * ROW_NBYTES >= 1 << 30  # what went through the arena
    sizes = [[line["orchestrator/bytes_per_sample"] for line in lines] for lines in (short, long)]
    assert all(abs(b - a) <= 32 for a, b in zip(*sizes, strict=True)), sizes
    assert max(map(max, sizes)) <= 512, sizes
    anonymous = [line["orchestrator/rss_anon_bytes"] for line in long]
    assert anonymous[-1] - anonymous[0] < 2 << 20, anonymous
