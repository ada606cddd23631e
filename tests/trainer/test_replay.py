"""Router replay: own ids change nothing, other ids do, gradients reach the routers, what cannot be right is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from shmrl.errors import RunError
from shmrl.trainer.models import check_packing
from shmrl.trainer.policy import Policy
from shmrl.trainer.replay import ROUTERS, RouterReplay
from tests.trainer.families import FAMILIES, build

TOKENS = torch.arange(3, 27).reshape(2, 12)


def own_routes(model, replay, tokens=TOKENS):
    """int64 [tokens, layers, 2] the routers choose themselves; ends with the hooks that watched them gone."""
    seen = {}
    routers = [m for m in model.modules() if type(m).__name__ in ROUTERS]
    hooks = [r.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(i, out[2])) for i, r in enumerate(routers)]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([seen[i] for i in range(len(replay.layers))], dim=1)


def logits_and_router_grads(model, replay, routes):
    model.zero_grad()
    with replay.routes(routes):
        logits = model(input_ids=TOKENS, use_cache=False).logits
        logits[:, :-1].log_softmax(-1).gather(2, TOKENS[:, 1:, None]).mean().backward()
    return logits.detach(), [m.weight.grad.clone() for m in model.modules() if type(m).__name__ in ROUTERS]


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_every_family(family):
    model = build(family)
    replay = RouterReplay(model)
    own = own_routes(model, replay)
    free, free_grads = logits_and_router_grads(model, replay, None)

    same, same_grads = logits_and_router_grads(model, replay, own)
    assert torch.equal(same, free)
    assert all(torch.equal(a, b) for a, b in zip(same_grads, free_grads, strict=True))

    swapped, _ = logits_and_router_grads(model, replay, own.flip(-1))
    assert torch.allclose(swapped, free, atol=1e-5)

    unrecorded, _ = logits_and_router_grads(model, replay, torch.full_like(own, -1))
    assert torch.equal(unrecorded, free)

    moved, moved_grads = logits_and_router_grads(model, replay, (own + 1) % 8)
    assert (moved - free).abs().max() > 0.01
    assert all(grad.abs().max() > 0 for grad in moved_grads)

    check_packing(Policy(model, replay=replay), torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_ids_change_exactly_the_rows_they_should(family):
    """In the last layer, their own; in an earlier one also those behind it, which attend to it."""
    model = build(family)
    replay = RouterReplay(model)
    own = own_routes(model, replay)
    free, _ = logits_and_router_grads(model, replay, None)
    row = 5  # of the second sequence
    for column in range(len(replay.layers)):
        routes = own.clone()
        routes[12 + row, column] = (routes[12 + row, column] + 1) % 8
        moved, _ = logits_and_router_grads(model, replay, routes)
        change = (moved - free).abs().amax(-1)
        expected = torch.zeros(2, 12, dtype=torch.bool)
        expected[1, row : 12 if replay.layers[column] == 0 else row + 1] = True
        assert (change[expected] > 1e-4).all()
        assert change[~expected].max() < 1e-5  # not 0: a product's rounding depends on how many rows an expert has


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_follows_a_bfloat16_sampler(family):
    """It flips routes near a tie. The trainer without replay departs from it there, with replay it follows."""
    model = build(family)
    sampler = copy.deepcopy(model).bfloat16()
    replay, tokens = RouterReplay(model), torch.randint(61, (8, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = own_routes(sampler, replay, tokens)
        flipped = (theirs.sort(-1).values != own_routes(model, replay, tokens).sort(-1).values).any(-1).any(-1)
        wanted = sampler(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
        free = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        with replay.routes(theirs):
            followed = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    assert 0 < flipped.sum() < len(flipped) / 2
    at = flipped.view(tokens.shape)
    kl = [(wanted.exp() * (wanted - mine)).sum(-1)[at].mean() for mine in (free, followed)]
    assert kl[1] < kl[0] / 2, kl
    own, _ = logits_and_router_grads(model, replay, own_routes(model, replay))
    assert torch.equal(own, logits_and_router_grads(model, replay, None)[0])


def test_layers_are_global_and_skip_the_dense_ones():
    assert RouterReplay(build("qwen3_moe")).layers == (0, 1)
    assert RouterReplay(build("deepseek_v3")).layers == (1,)


def test_a_partly_recorded_batch_replays_only_what_is_there():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    routes = (own_routes(model, replay) + 1) % 8
    routes[12:] = -1  # the second sequence has none
    free, _ = logits_and_router_grads(model, replay, None)
    mixed, _ = logits_and_router_grads(model, replay, routes)
    assert torch.allclose(mixed[1], free[1], atol=1e-5)
    assert (mixed[0] - free[0]).abs().max() > 0.01


def test_checkpointed_layers_replay_in_the_backward_pass_too():
    from shmrl.trainer.models import _checkpoint_layers

    model = build("qwen3_moe")
    replay = RouterReplay(model)
    routes = (own_routes(model, replay) + 3) % 8
    _, plain = logits_and_router_grads(model, replay, routes)
    _checkpoint_layers(model)
    _, again = logits_and_router_grads(model, replay, routes)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_wrong_number_of_rows_is_refused():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    with (
        pytest.raises(RunError, match="layer 0 routed 24 tokens, 23 rows were recorded"),
        replay.routes(torch.zeros(23, 2, 2, dtype=torch.int64)),
    ):
        model(input_ids=TOKENS, use_cache=False)


def test_a_layer_that_consumes_nothing_is_an_error():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    with (
        pytest.raises(RunError, match=r"layers \[0, 1\] consumed none of the 24 recorded rows"),
        replay.routes(torch.zeros(24, 2, 2, dtype=torch.int64)),
    ):
        pass


def test_a_dense_model_is_refused():
    with pytest.raises(RunError, match="router_replay = true, but Sequential has no router"):
        RouterReplay(nn.Sequential(nn.Linear(2, 2)))


def test_an_unknown_router_is_named():
    class NewRouter(nn.Module):
        pass

    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"gate": NewRouter()})])})
    with pytest.raises(RunError, match=r"no router replay for NewRouter \(layers\.0\.gate\)"):
        RouterReplay(model)


UPGRADES = {
    "weights": (lambda out: (out[0], out[1] * 2, out[2]), "weighs its experts in another way"),
    "ids": (lambda out: (out[0], out[1], out[2].flip(-1)), "weighs its experts in another way"),
    "probabilities": (lambda out: (out[0].softmax(-1), out[1], out[2]), "weighs its experts in another way"),
    "two results": (
        lambda out: out[1:],
        r"returns 2 results, expected \(logits \[16, 8\], weights and ids \[16, 2\]\)",
    ),
    "dense weights": (
        lambda out: (out[0], out[0].sigmoid(), out[2]),
        r"returns \[16, 8\], \[16, 8\] and \[16, 2\], exp",
    ),
}


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_that_an_upgrade_has_changed_is_refused(family, upgrade):
    model = build(family)
    changed, message = UPGRADES[upgrade]
    layer = max(RouterReplay(model).layers)
    router = next(m for n, m in model.named_modules() if f"layers.{layer}." in n and type(m).__name__ in ROUTERS)
    forward = router.forward
    router.forward = lambda hidden: changed(forward(hidden))
    with pytest.raises(RunError, match=f"{type(router).__name__} of layer {layer} {message}"):
        RouterReplay(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_that_an_upgrade_has_renamed_is_named(family):
    model = build(family)
    for router in [module for module in model.modules() if type(module).__name__ in ROUTERS]:
        router.__class__ = type(f"New{type(router).__name__}", (type(router),), {})
    with pytest.raises(RunError, match="no router replay for New"):
        RouterReplay(model)


def test_ids_are_checked_on_the_host_and_widened_exactly():
    replay = RouterReplay(build("qwen3_moe"))
    routing = np.array([[[0, 7], [1, 2]], [[3, 4], [5, 6]]], dtype=np.uint8)
    covered = np.array([True, False])
    assert replay.checked(routing, covered).tolist() == [[[0, 7], [1, 2]], [[-1, -1], [-1, -1]]]
    routing[0, 1, 1] = 8
    with pytest.raises(RunError, match="recorded expert 8 at position 0, layer 1: the model has 8 experts"):
        replay.checked(routing, covered)
    with pytest.raises(RunError, match=r"\[layers, top_k\] = \[1, 2\], the model has \[2, 2\]"):
        replay.checked(routing[:, :1], covered)
    replay.num_experts = 512
    wide = np.full((2, 2, 2), 511, dtype=np.uint16)  # torch's uint16 has no max and no arange
    assert replay.checked(wide, np.array([True, True])).max() == 511
    replay.num_experts = 256
    narrow = np.full((2, 2, 2), 255, dtype=np.uint8)
    assert replay.checked(narrow, covered)[:, 0, 0].tolist() == [255, -1]
