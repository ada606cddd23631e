"""Checkpoints on disk: complete or absent, how many stay, what is refused; and the learning rate a step resumes at."""

import json
import resource

import pytest
import torch

from shmrl.config.rundir import latest_checkpoint
from shmrl.errors import RunError
from shmrl.trainer import checkpoint
from shmrl.trainer.loop import learning_rate
from shmrl.trainer.models import load_policy
from shmrl.trainer.parallel import Ranks, full_state
from shmrl.trainer.weights import steps_in


@pytest.fixture
def trained(make_tree, model_dir):
    """(save(tree, step), tree, ranks, policy, optimizer) after one optimizer step."""
    ranks = Ranks("cpu")
    tree = make_tree(checkpoint={"interval": 1, "keep_last": 2, "keep_every": 3})
    policy = load_policy(tree, model_dir, ranks.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def save(step, state=None):
        weights = full_state(policy.lm)
        checkpoint.save(
            tree, ranks, step, policy, weights, optimizer, state or {"at": step}, model_dir, {"train/loss": 0.5}
        )

    yield save, tree, ranks, policy, optimizer
    ranks.close()


def test_the_newest_and_every_kth_stay(trained):
    save, tree, *_ = trained
    for step in range(1, 8):
        save(step)
    assert steps_in(tree.run.output_dir / "checkpoints") == [3, 6, 7]
    assert latest_checkpoint(tree.run.output_dir) == 7
    at = checkpoint.checkpoint_dir(tree, 7)
    assert json.loads((at / "orchestrator.json").read_text()) == {"at": 7}
    assert {"model.safetensors", "config.json", "tokenizer.json", "optimizer.pt", "STABLE"} <= {
        f.name for f in at.iterdir()
    }


def test_a_save_that_fails_leaves_the_last_one(trained):
    save, tree, *_ = trained
    save(1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(2, {"at": {2}})
    assert [path.name for path in (tree.run.output_dir / "checkpoints").iterdir()] == ["step_1"]
    assert latest_checkpoint(tree.run.output_dir) == 1


@pytest.mark.parametrize("limit", [10_000, 300_000])  # within the model, and within the optimizer's state
def test_a_full_disk_is_named_and_leaves_nothing(trained, limit):
    save, tree, *_ = trained
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RunError, match=r"checkpoints/step_1 cannot be written, [\d,]+ B are free: "):
            save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tree.run.output_dir / "checkpoints").iterdir()) == []


def test_optimizer_and_rng_come_back(trained):
    save, tree, ranks, policy, optimizer = trained
    torch.manual_seed(7)
    save(1)
    drawn = torch.rand(3)
    fresh = load_policy(tree, checkpoint.checkpoint_dir(tree, 1), ranks.device)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    assert checkpoint.restore(tree, ranks, 1, fresh, again) == {"train/loss": 0.5}
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), policy.parameters(), strict=True))
    for mine, theirs in zip(policy.parameters(), fresh.parameters(), strict=True):
        old, new = optimizer.state[mine], again.state[theirs]
        assert all(torch.equal(old[name], new[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_a_checkpoint_of_another_format_is_refused(trained):
    save, tree, ranks, policy, optimizer = trained
    save(1)
    note = checkpoint.checkpoint_dir(tree, 1) / "trainer.json"
    note.write_text(note.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(RunError, match=r"it says {'format': 99, .*}, expected format 1 and step 1"):
        checkpoint.restore(tree, ranks, 1, policy, optimizer)


@pytest.mark.parametrize("name", ["trainer.json", "optimizer.pt", "rng.pt"])
def test_a_damaged_file_is_named_with_the_way_out(trained, name):
    save, tree, ranks, policy, optimizer = trained
    save(1)
    file = checkpoint.checkpoint_dir(tree, 1) / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(RunError, match=rf"{file} cannot be read \(.*: remove {file.parent} to resume from the"):
        checkpoint.restore(tree, ranks, 1, policy, optimizer)


def test_damaged_weights_are_named(trained):
    save, tree, ranks, *_ = trained
    save(1)
    file = checkpoint.checkpoint_dir(tree, 1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(RunError, match=rf"cannot load the model in {file.parent}: SafetensorError"):
        load_policy(tree, file.parent, ranks.device)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"kind": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"kind": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"kind": "linear", "warmup_steps": 2, "min_ratio": 0.5}, [0.5, 1.0, 1.0, 0.75, 0.5]),
        ({"kind": "cosine", "min_ratio": 0.2}, [1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_learning_rates(make_tree, schedule, rates):
    trainer = make_tree(scheduler=schedule, optimizer={"lr": 1.0}).trainer
    assert [learning_rate(trainer, 5, step) for step in range(1, 6)] == pytest.approx(rates, abs=1e-6)
