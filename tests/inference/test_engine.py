"""The batching engine against transformers itself: the same tokens, log-probabilities and routes."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shmrl.errors import EngineError
from shmrl.inference.embedded.model import Model
from shmrl.inference.embedded.tiny import write_tiny
from tests.inference.conftest import SHAPE, Driver

PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(1 + (5 * i) % 23)] for i in range(12)]
SAMPLED = {"max_tokens": 24, "ignore_eos": True, "logprobs": 8}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def greedy(net: Any, prompt: list[int], n: int) -> list[int]:
    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    tokens = net.generate(**given, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


@torch.no_grad()
def full_forward(net: Any, tokens: list[int]) -> tuple[torch.Tensor, np.ndarray]:
    """As a trainer does it, without a cache: (log-probabilities [T, V], routes [T, L, K])."""
    out = net(torch.tensor([tokens]), use_cache=False, output_router_logits=True)
    routes = torch.stack([logits.topk(2, -1).indices for logits in out.router_logits], 1)
    return out.logits[0].float().log_softmax(-1), routes.numpy()


def reference(path: Path) -> Any:
    """The checkpoint as transformers alone runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def net(tiny_dir: Path) -> Any:
    return reference(tiny_dir)


@pytest.fixture
def original(driver: Driver, tiny_dir: Path) -> Iterator[Driver]:
    """The driver, with its weights and version put back afterwards."""
    yield driver
    driver.engine.load_weights(tiny_dir).result(30)
    driver.engine.set_version("0").result(30)


def test_greedy_tokens_equal_generate(driver: Driver, net: Any) -> None:
    rows = driver.rows(*((p, {"temperature": 0, "max_tokens": 24, "ignore_eos": True}) for p in PROMPTS))
    assert [row.tokens for row in rows] == [greedy(net, p, 24) for p in PROMPTS]


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_k": 32}, {"temperature": 0.7, "min_p": 0.05}])
def test_a_request_draws_the_same_whoever_is_batched_beside_it(driver: Driver, sampling: dict[str, Any]) -> None:
    lengths = [5 + (11 * i) % 40 for i in range(len(PROMPTS))]  # rows leave at different steps
    asked = [(p, {**SAMPLED, **sampling, "seed": i, "max_tokens": lengths[i]}) for i, p in enumerate(PROMPTS)]
    for row, alone in zip(driver.rows(*asked), [driver.rows(one)[0] for one in asked], strict=True):
        assert row.tokens == alone.tokens
        assert row.logprobs == pytest.approx(alone.logprobs, abs=5e-5)


def test_rows_join_while_others_run_and_wait_for_a_free_slot(tiny_dir: Path, driver: Driver) -> None:
    small = Driver(tiny_dir, max_num_seqs=3)
    pending = []
    for i, prompt in enumerate(PROMPTS):
        pending.append(small.submit(prompt, **SAMPLED, seed=i))
        until(lambda i=i: small.engine.stats().generation_tokens > 2 * i)
    assert all(done.wait(30) for _, done in pending)
    small.engine.close()
    alone = driver.rows(*((p, {**SAMPLED, "seed": i}) for i, p in enumerate(PROMPTS)))
    assert [request.rows[0].tokens for request, _ in pending] == [row.tokens for row in alone]
    assert small.engine.stats().finished == {"length": 12}


def test_logprobs_and_routes_equal_a_full_forward(driver: Driver, net: Any) -> None:
    for row in driver.rows(*((p, {**SAMPLED, "seed": i}) for i, p in enumerate(PROMPTS))):
        logprobs, routes = full_forward(net, row.prompt + row.tokens)
        drawn = logprobs[len(row.prompt) - 1 : -1]
        assert row.logprobs == pytest.approx(
            drawn.gather(1, torch.tensor(row.tokens)[:, None])[:, 0].tolist(), abs=1e-5
        )
        best = drawn.topk(8)
        assert np.array(row.head_logprobs) == pytest.approx(best.values.numpy(), abs=1e-5)
        captured = row.all_routing()
        assert captured is not None
        assert (captured.shape, captured.dtype) == ((len(row.prompt) + 24 - 1, 4, 2), np.uint8)
        assert (captured == routes[:-1]).all()


def test_masks_hold_the_drawn_id_and_the_whole_mass(driver: Driver, net: Any) -> None:
    sampling = {**SAMPLED, "logprobs": 40, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7}
    for row in driver.rows(*((p, {**sampling, "seed": i}) for i, p in enumerate(PROMPTS))):
        logprobs, _ = full_forward(net, row.prompt + row.tokens)
        for i, (token, kept) in enumerate(zip(row.tokens, row.kept, strict=True)):
            assert kept is not None
            assert token in kept
            assert sorted(set(kept.tolist())) == kept.tolist()
            head = dict(zip(row.head_ids[i].tolist(), row.head_logprobs[i].tolist(), strict=True))
            assert {t for t, lp in head.items() if lp > -np.inf} == set(kept.tolist())
            assert sum(np.exp([head[t] for t in kept.tolist()])) == pytest.approx(1, abs=1e-5)
            over_kept = (logprobs[len(row.prompt) - 1 + i] / 0.7)[torch.tensor(kept.tolist())].log_softmax(0)
            assert row.logprobs[i] == pytest.approx(over_kept[kept.tolist().index(token)].item(), abs=2e-5)


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "DeepseekV3", "Glm4Moe", "Olmoe", "Qwen3Moe"])
def test_other_families_that_use_full_attention(family: str, tmp_path: Path) -> None:
    """DeepSeek-V3: keys and values differ in width. Qwen3-MoE here, DeepSeek-V3 and GLM-4 have dense first layers."""
    torch.manual_seed(0)
    path = save_small(family, tmp_path)
    small, net = Driver(path), reference(path)
    rows = small.rows(*((p, {"temperature": 0, "max_tokens": 12, "ignore_eos": True}) for p in PROMPTS[:4]))
    small.engine.close()
    assert [row.tokens for row in rows] == [greedy(net, p, 12) for p in PROMPTS[:4]]
    captured = rows[0].all_routing()
    if family == "Llama":
        assert captured is None
    else:
        assert captured is not None
        assert captured.shape == (len(PROMPTS[0]) + 11, 2, 2)
        dense = family in ("DeepseekV3", "Glm4Moe", "Qwen3Moe")
        assert (captured[:, 0] == [0, 1]).all() == dense


def save_small(family: str, path: Path, *, num_experts: int = 4, **more: Any) -> Path:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    names = ("num_experts", "n_routed_experts", "num_local_experts")  # what each family calls it
    experts = {**dict.fromkeys(names, num_experts), "num_experts_per_tok": 2}
    dense = {"first_k_dense_replace": 1, "mlp_only_layers": [0], "moe_intermediate_size": 24, "n_group": 1}
    mla = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    if family == "DeepseekV3":
        heads |= {"num_key_value_heads": 4}
    given = {**sizes, **heads, **experts, **dense, "topk_group": 1, "sliding_window": None, "initializer_range": 0.2}
    given |= mla if family == "DeepseekV3" else {}
    config = getattr(transformers, f"{family}Config")(**given | more)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_routing_is_as_narrow_as_the_expert_count_allows(tmp_path: Path, experts: int, dtype: type) -> None:
    model = Model(save_small("Qwen3Moe", tmp_path, num_experts=experts, mlp_only_layers=[]))
    _, routing = model.prefill([list(range(200))], 0)
    assert routing is not None
    assert (routing.dtype, model.num_experts) == (dtype, experts)
    assert routing.max() > 200


def test_sliding_windows_are_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="full attention in every layer, but mistral needs DynamicSlidingWindowLayer"):
        Model(save_small("Mistral", tmp_path, sliding_window=16))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no config\.json"):
        Model(tmp_path)


def test_bfloat16_serves_and_reports_float32_logprobs(tiny_dir: Path) -> None:
    model = Model(tiny_dir, dtype="bfloat16")
    logits, routing = model.prefill([[1, 2, 3]], 0)
    assert (model.net.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert routing is not None
    assert routing.shape == (1, 3, 4, 2)


# ---------------------------------------------------------------------------------------------------------------- ends


def test_how_a_row_ends(driver: Driver) -> None:
    prompt = PROMPTS[3]
    tokens = driver.rows((prompt, {"temperature": 0, "max_tokens": 12, "ignore_eos": True}))[0].tokens
    stop = tokens[6]
    first = tokens.index(stop)
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    by_id, by_length, later = driver.rows(
        (prompt, {**asked, "stop_token_ids": [stop]}),
        (prompt, {**asked, "max_tokens": 3}),
        (prompt, {**asked, "stop_token_ids": [stop], "min_tokens": first + 3}),
    )
    assert (by_id.tokens, by_id.finish, by_id.stop_reason) == (tokens[: first + 1], "stop", stop)
    assert (by_length.tokens, by_length.finish, by_length.stop_reason) == (tokens[:3], "length", None)
    assert later.tokens[:first] == tokens[:first]
    assert stop not in later.tokens[: first + 3]


def test_eos_ends_a_row_unless_ignored(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    tokens = driver.rows((PROMPTS[1], {**asked, "ignore_eos": True}))[0].tokens
    monkeypatch.setattr(driver.engine, "_eos", frozenset([tokens[2]]))
    ended, ignoring = driver.rows((PROMPTS[1], asked), (PROMPTS[1], {**asked, "ignore_eos": True}))
    assert (ended.tokens, ended.finish, ended.stop_reason) == (tokens[: tokens.index(tokens[2]) + 1], "stop", None)
    assert ignoring.tokens == tokens


def test_stop_strings_are_found_across_tokens(driver: Driver) -> None:
    sampling = {"seed": 4, "max_tokens": 100, "ignore_eos": True}
    free = driver.rows((PROMPTS[2], sampling))[0]
    text = driver.tokenizer.decode(free.tokens, skip_special_tokens=True)
    stop = next(text[i : i + 2] for i in range(20, len(text)) if text[i : i + 2].isascii() and len(text) > i + 2)
    row = driver.rows((PROMPTS[2], {**sampling, "stop": ["never there", stop]}))[0]
    assert (row.finish, row.stop_reason) == ("stop", stop)
    assert row.tokens == free.tokens[: len(row.tokens)]
    assert driver.tokenizer.decode(row.tokens, skip_special_tokens=True).index(stop) == text.index(stop)
    assert stop not in driver.tokenizer.decode(row.tokens[:-1], skip_special_tokens=True)


def test_generation_ends_where_the_context_does(driver: Driver) -> None:
    row = driver.rows(([5] * 509, {"max_tokens": 50, "ignore_eos": True}))[0]
    assert (len(row.tokens), row.finish) == (3, "length")


# ---------------------------------------------------------------------------------------------------- weights and pause


def test_new_weights_are_what_a_fresh_model_computes(original: Driver, other_dir: Path) -> None:
    original.engine.load_weights(other_dir).result(30)
    row = original.rows((PROMPTS[4], {"temperature": 0, "max_tokens": 16, "ignore_eos": True}))[0]
    assert row.tokens == greedy(reference(other_dir), PROMPTS[4], 16)


def test_pause_keep_goes_on_under_new_weights_with_versions_per_token(original: Driver, other_dir: Path) -> None:
    sampling = {"seed": 1, "max_tokens": 150, "ignore_eos": True}
    undisturbed = original.rows((PROMPTS[5], sampling))[0]
    request, done = original.submit(PROMPTS[5], **sampling)
    row = request.rows[0]
    until(lambda: len(row.tokens) > 20)
    original.engine.pause("keep").result(30)
    at = len(row.tokens)
    assert original.engine.paused
    original.engine.load_weights(other_dir).result(30)
    original.engine.set_version("1").result(30)
    assert len(row.tokens) == at
    original.engine.resume().result(30)
    assert done.wait(30)
    assert row.spans == [("0", 0, at), ("1", at, 150)]
    assert row.tokens[:at] == undisturbed.tokens[:at]
    assert row.tokens[at:] != undisturbed.tokens[at:]


def test_pause_wait_finishes_what_runs_and_holds_what_comes(driver: Driver) -> None:
    request, done = driver.submit(PROMPTS[6], seed=1, max_tokens=100, ignore_eos=True)
    until(lambda: bool(request.rows[0].tokens))
    driver.engine.pause("wait").result(30)
    assert done.is_set()
    assert request.rows[0].finish == "length"
    later, later_done = driver.submit(PROMPTS[6], max_tokens=2)
    assert driver.engine.call(lambda: driver.engine.stats().waiting).result(30) == 1
    assert later.rows[0].tokens == []
    driver.engine.resume().result(30)
    assert later_done.wait(30)


def test_abort_returns_what_there_is(driver: Driver) -> None:
    running, running_done = driver.submit(PROMPTS[7], seed=1, max_tokens=400, ignore_eos=True)
    until(lambda: len(running.rows[0].tokens) > 5)
    driver.engine.pause("keep").result(30)
    waiting, waiting_done = driver.submit(PROMPTS[7], max_tokens=4)
    driver.engine.pause("abort").result(30)
    driver.engine.resume().result(30)
    assert running_done.wait(30)
    assert waiting_done.wait(30)
    row, empty = running.rows[0], waiting.rows[0]
    assert (row.finish, empty.finish, empty.tokens, empty.all_routing()) == ("abort", "abort", [], None)
    captured = row.all_routing()
    assert captured is not None
    assert len(captured) == len(row.prompt) + len(row.tokens) - 1
    assert row.spans == [("0", 0, len(row.tokens))]


@pytest.mark.parametrize("damage", ["shape", "missing", "truncated"])
def test_a_failed_load_keeps_the_old_weights(driver: Driver, tmp_path: Path, damage: str) -> None:
    asked = (PROMPTS[8], {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    before = driver.rows(asked)[0].tokens
    with pytest.raises(EngineError, match=str(tmp_path)):
        driver.engine.load_weights(damaged(tmp_path, damage)).result(30)
    assert driver.rows(asked)[0].tokens == before


def damaged(path: Path, damage: str) -> Path:
    if damage == "shape":
        return save_small("Qwen3Moe", path)
    write_tiny(SHAPE, path / "new", seed=5)
    file = path / "new" / "model.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1000])
    return path / "new"


# -------------------------------------------------------------------------------------------------------------- faults


class Poisoned:
    """A model that raises, or answers NaN, for rows that feed one token."""

    def __init__(self, net: Any, token: int, *, nan: bool) -> None:
        self._net, self._token, self._nan = net, token, nan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        poisoned = (input_ids == self._token).any(-1)
        if poisoned.any() and not self._nan:
            raise RuntimeError(f"token {self._token} is poison")
        out = self._net(input_ids=input_ids, **kwargs)
        out.logits[poisoned] = torch.nan
        return out


@pytest.mark.parametrize("nan", [False, True])
def test_a_request_that_breaks_the_step_fails_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch, nan: bool) -> None:
    asked = [(p, {**SAMPLED, "seed": i}) for i, p in enumerate(PROMPTS)]
    expected = [row.tokens for row in driver.rows(*asked)]
    monkeypatch.setattr(driver.model, "net", Poisoned(driver.model.net, 511, nan=nan))
    pending = [driver.submit(p, **sampling) for p, sampling in [*asked, ([1, 511, 2], SAMPLED)]]
    assert all(done.wait(30) for _, done in pending)
    *others, (poisoned, _) = pending
    assert ("not finite" if nan else "is poison") in str(poisoned.error)
    for (request, _), tokens in zip(others, expected, strict=True):
        fed_it = 511 in tokens[:-1]  # a row may draw the token itself, and then fails where it is fed
        assert (request.error is not None) == fed_it
        assert fed_it or request.rows[0].tokens == tokens


def test_the_death_of_the_engine_thread_fails_its_requests(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Driver(tiny_dir)
    died = threading.Event()
    small.engine.on_death = died.set
    monkeypatch.setattr(small.engine, "_retire", lambda: 1 / 0)
    request, done = small.submit([1, 2], max_tokens=4)
    assert done.wait(30)
    assert died.wait(30)
    assert "division by zero" in str(request.error)
    with pytest.raises(EngineError, match="the engine thread has died: division by zero"):
        small.submit([1, 2])
