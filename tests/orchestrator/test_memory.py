"""What passes through the orchestrator does not depend on how long episodes are: bytes on its sockets, its memory."""

import pytest

from tests.orchestrator.test_run import CONFIG, Site
from tests.orchestrator.wide import ROW_NBYTES, Repeating, wide_model

pytestmark = pytest.mark.timeout(300)

SHORT, LONG = 100, 20_000
STEPS = 10


async def _run(directory, model_dir, tokens, steps):
    """Metrics of a run whose episodes have about `tokens` tokens each."""
    text = CONFIG.replace("batch_size = 8", "batch_size = 16").replace(
        "top_p = 0.95, top_k = 32, max_tokens = 8", f"max_tokens = {tokens - 1}"
    )
    text = text.replace("max_model_len = 256", f"max_model_len = {2 * LONG}").replace(
        "seq_len = 256", f"seq_len = {LONG}"
    )
    directory.mkdir()
    async with (
        Repeating(tokens) as engine,
        Site(
            directory,
            wide_model(directory, model_dir),
            engine,
            text,
            "512MiB",
            run__max_steps=str(steps),
            trainer__head="0",
        ) as site,
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
