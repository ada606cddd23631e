"""What loading checks: packed sequences that see each other, heads that do more, files that do not fit."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file

from shmrl.errors import RunError
from shmrl.trainer import models
from shmrl.trainer.fold import whole
from shmrl.trainer.models import check_packing, load_model, load_policy
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.policy import Policy
from shmrl.trainer.step import Stepper
from tests.trainer.families import build
from tests.trainer.samples import put, retire, ship

CPU = torch.device("cpu")


def test_packed_rows_that_bleed_are_found():
    """gpt-oss never tells its mask where sequences begin; Qwen3-MoE does."""
    check_packing(Policy(build("qwen3_moe"), packed=True), CPU)
    with pytest.raises(RunError, match="GptOssForCausalLM: packed sequences score differently"):
        check_packing(Policy(build("gpt_oss"), packed=True), CPU)


def test_a_head_that_does_more_than_project_is_found():
    model = build("qwen3_moe")
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 2)
    with pytest.raises(RunError, match="or the head is not a plain projection"):
        check_packing(Policy(model), CPU)


def test_a_fold_and_its_predictors():
    fold = whole((3, 1, 2))
    assert fold.index.tolist() == [[0, 1, 2], [3, -1, -1], [4, 5, -1]]
    assert fold.predictors(torch.tensor([1, 2, 5]).numpy()).tolist() == [0, 1, 6]
    assert fold.spread(torch.arange(10, 16).numpy(), 0).tolist() == [[10, 11, 12], [13, 0, 0], [14, 15, 0]]
    packed = whole((3, 1, 2), packed=True)
    assert packed.positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed.predictors(torch.tensor([1, 2, 5]).numpy()).tolist() == [0, 1, 4]
    with pytest.raises(RunError, match="sequence 1 has loss on its first token"):
        fold.predictors(torch.tensor([1, 3]).numpy())


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(RunError, match=f"{tmp_path} is no model directory: it has no config.json"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_are_named(model_dir, tmp_path):
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"1 missing_keys: model\.norm\.weight"):
        load_model(tmp_path)


def test_weights_are_float32_and_dropout_is_off(make_tree):
    tree = make_tree(precision="bfloat16")
    policy = load_policy(tree, tree.initial_weights, CPU)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert not policy.lm.training


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch filters one of its own, but later
def test_compiled_layers_compute_what_eager_ones_do(backend, make_tree, arena, branches, monkeypatch):
    """With routes to replay. The backend "eager" runs what was traced, without the kernels, which take minutes."""
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # else there is a pool of processes afterwards
    monkeypatch.setattr(models, "compile_layers", functools.partial(models.compile_layers, backend=backend))
    ranks, samples = Ranks("cpu"), put(arena, branches[:4])
    (micro_batches,) = ship(arena, samples, ranks=1, readers=3)
    metrics, weights = [], []
    for compiled in (False, True):
        tree = make_tree(compile=compiled)
        policy = load_policy(tree, tree.initial_weights, CPU)
        one = Stepper(tree, ranks, arena, policy, policy, torch.optim.SGD(policy.parameters(), lr=0.0))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        metrics.append(one.run(1, micro_batches, lr=0.05))
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > before) == compiled
        weights.append(policy.state_dict())
    ranks.close()
    for name in ("train/loss", "train/entropy", "train/grad_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4), name
    assert all(torch.allclose(weights[1][name], weights[0][name], atol=1e-5) for name in weights[0])
    retire(arena, samples, 1)
    arena.done([h for s in samples for h in s.handles], reader=2)
