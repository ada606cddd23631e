"""A run's tree on fake vLLM engines, with the model directory that the checks read."""

import pytest

from tests.support.fake_vllm import FakeVllm, run_on


@pytest.fixture
def tree(tmp_path):
    """tree(*engines, config={...}, **flags): a run that generates through these engines."""

    def build(*engines, **changes):
        flags = {"trainer__head": "4", **changes}
        return run_on(tmp_path, *(engine.url for engine in engines), **flags)

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
