"""What is found out about a vLLM before an episode starts, on engines that speak the recorded dialects."""

import pytest

from shmrl.errors import EngineError
from shmrl.inference.client import EngineClient
from shmrl.inference.vllm.checks import greet


async def ask(tree, *engines):
    async with EngineClient([engine.url for engine in engines], timeout_s=20) as client:
        return await greet(client, tree)


@pytest.mark.parametrize(("options", "derive"), [({"release": "0.30"}, True), ({"release": "0.32"}, False)])
async def test_masks_are_derived_where_there_are_none(fake, tree, options, derive):
    engine = await fake(**options)
    assert await ask(tree(engine), engine) is derive
    assert engine.loaded == [str(tree(engine).initial_weights)]


async def test_one_engine_without_masks_decides_for_all(fake, tree):
    engines = [await fake(release="0.32"), await fake(release="0.30", generate=False)]
    assert await ask(tree(*engines), *engines) is True
    assert all(len(engine.loaded) == 1 for engine in engines)


async def test_columns_of_dense_layers_are_expected(fake, tree):
    engine = await fake(dense=2)
    config = {"num_hidden_layers": 6, "first_k_dense_replace": 2}
    await ask(tree(engine, config=config), engine)
    with pytest.raises(EngineError, match=r"routing: uint8 \(32, 6, 2\), expected integers \[n, 4, 2\]"):
        await ask(tree(engine), engine)


async def test_a_declared_field_that_does_not_come_is_refused(fake, tree):
    engine = await fake(routing=False)
    with pytest.raises(
        EngineError, match=r"vLLM 0\.30\.0\) does not deliver .*routing: the engine returned none.*--enable"
    ):
        await ask(tree(engine), engine)
    await ask(tree(engine, trainer__router_replay="false"), engine)


async def test_truncated_sampling_without_a_usable_mask_is_refused(fake, tree, monkeypatch):
    raw = await fake()
    monkeypatch.setattr(raw, "_process", lambda *_: None)  # raw log-probabilities: they do not add up to 1
    with pytest.raises(EngineError, match=r"mask: no kept ids at position 32.*top_k=8.*processed_logprobs"):
        await ask(tree(raw), raw)
    narrow = await fake(max_logprobs=6)
    with pytest.raises(EngineError, match="Requested sample logprobs of 8, which is greater than max allowed: 6"):
        await ask(tree(narrow), narrow)
    await ask(tree(narrow, trainer__sampling_replay="false"), narrow)


async def test_a_reload_that_changes_the_weights_is_refused(fake, tree):
    engine = await fake(bad_reload=True)
    with pytest.raises(
        EngineError, match=r"after loading .*, which it should have served already, token \d+ of a probe"
    ):
        await ask(tree(engine), engine)


async def test_an_engine_without_our_extension_is_told_how_to_start(fake, tree, monkeypatch):
    engine = await fake()
    monkeypatch.setattr("shmrl.inference.vllm.checks.LOAD_METHOD", "broken")
    tree_ = tree(engine)
    monkeypatch.setattr(type(tree_), "newest_weights", "/broken")
    with pytest.raises(EngineError, match=r"/broken is cut short; .*--worker-extension-cls shmrl_vllm_worker\.Shmrl"):
        await ask(tree_, engine)


async def test_an_old_version_is_refused(fake, tree):
    engine = await fake()
    engine.release = "0.21"
    with pytest.raises(EngineError, match=r"vLLM 0\.21\.0 is older than 0\.27"):
        await ask(tree(engine), engine)
