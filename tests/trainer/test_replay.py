"""Router replay: own ids change nothing, other ids do, gradients reach the routers, what cannot be right is refused."""

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


def own_routes(model, replay):
    """int64 [24, layers, 2] the routers choose themselves; ends with the hooks that watched them gone."""
    seen = {}
    routers = [m for m in model.modules() if type(m).__name__ in ROUTERS]
    hooks = [r.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(i, out[2])) for i, r in enumerate(routers)]
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
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


def test_a_router_that_weighs_in_another_way_is_refused():
    model = build("qwen3_moe")
    router = model.model.layers[1].mlp.gate
    router.norm_topk_prob = False
    forward = router.forward
    router.forward = lambda hidden: (lambda out: (out[0], out[1] * 2, out[2]))(forward(hidden))
    with pytest.raises(RunError, match="Qwen3MoeTopKRouter of layer 1 weighs its experts in another way"):
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
