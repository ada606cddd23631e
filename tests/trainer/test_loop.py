"""The whole trainer under torch.distributed.run, from warm-up to finish; then one rank and its resume."""

import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shmrl.config import dump_toml
from shmrl.config.rundir import latest_checkpoint
from shmrl.config.tables import Restarts
from shmrl.errors import RunError
from shmrl.inference.vllm.plugin.shmrl_broadcast import receive
from shmrl.trainer.checkpoint import checkpoint_dir
from shmrl.trainer.loop import RankLoop
from shmrl.trainer.parallel import Ranks
from tests.trainer.fake_orchestrator import FakeOrchestrator
from tests.trainer.samples import bare, put, retire, ship

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def orchestrate():
    """orchestrate(tree) -> a FakeOrchestrator that is closed after the test."""
    made = []

    def make(tree):
        made.append(FakeOrchestrator(tree))
        return made[-1]

    yield make
    for orchestrator in made:
        orchestrator.close()


@pytest.fixture
def start_trainer(tmp_path):
    """start_trainer(tree) -> the process of torch.distributed.run; ended after the test, whatever happened."""
    started = []

    def start(tree):
        file = tmp_path / "trainer.toml"
        file.write_text(dump_toml(tree))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tree.trainer.ranks)]
        launch += ["--log-dir", str(tmp_path)]  # else torch leaves one in /tmp
        process = subprocess.Popen(
            [sys.executable, *launch, "-m", "shmrl", "trainer", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "SHMRL_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


def finished(process):
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


def test_two_ranks_from_warm_up_to_the_end(make_tree, arena, branches, orchestrate, start_trainer, run_rank):
    warmup = {"steps": 1, "batch_size": 6}
    tree = make_tree(ranks=2, fsdp=True, warmup=warmup, checkpoint={"interval": 0}, keep_weights=1)
    orchestrator = orchestrate(tree)
    process = start_trainer(tree)
    hellos = orchestrator.greet()
    assert {(h["rank"], h["world"], h["step"], h["token"]) for h in hellos.values()} == {
        (0, 2, 0, TOKEN),
        (1, 2, 0, TOKEN),
    }

    demos = put(arena, [bare(branch, routing=False) for branch in branches[:6]])
    orchestrator.ship("warmup", 1, ship(arena, demos, ranks=2))
    report = orchestrator.expect("report")
    assert (report["step"], report["mode"]) == (1, "warmup")
    assert report["metrics"]["train/loss"] > 1
    retire(arena, demos, 2)

    orchestrator.tell(kind="begin", version=0, state={})
    published = orchestrator.expect("published")
    assert (published["version"], published["path"]) == (0, str(tree.weights_dir(0)))
    assert not torch.equal(weights_of(published["path"]), weights_of(tree.initial_weights))

    for step in (1, 2):
        samples = put(arena, branches)
        packed = ship(arena, samples, ranks=2, step=step)
        orchestrator.ship("step", step, packed, state={"position": step})
        published = orchestrator.expect("published")
        report = orchestrator.expect("report")
        assert (published["version"], report["step"], report["mode"]) == (step, step, "train")
        assert report["metrics"]["payload/bytes"] == sum(s.handles[0].nbytes for s in samples)
        assert report["metrics"].keys() >= METRICS
        retire(arena, samples, 2)
    orchestrator.tell(kind="finish")
    finished(process)

    assert arena.stats()["blocks"] == 0
    assert sorted(path.name for path in (tree.run.output_dir / "weights").iterdir()) == ["step_0", "step_2"]
    lm = AutoModelForCausalLM.from_pretrained(tree.weights_dir(2))
    assert lm.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 64, 32)
    assert AutoTokenizer.from_pretrained(tree.weights_dir(2)).decode([104, 105])
    assert latest_checkpoint(tree.run.output_dir) == 2
    assert (checkpoint_dir(tree, 2) / "orchestrator.json").read_text() == '{"position": 2}\n'

    alone = make_tree(checkpoint={"interval": 0})  # sharded ranks' checkpoint continues on one
    orchestrator.tree = alone
    run_rank(alone, True, train(orchestrator, arena, branches, (3,), 2))
    assert latest_checkpoint(tree.run.output_dir) == 3


METRICS = {
    "train/loss", "train/mismatch_kl", "train/entropy", "train/masked_fraction", "train/grad_norm",
    "train/tokens_per_s",
    "train/lr", "time/assemble", "time/fetch_mean", "time/fetch_max", "time/train", "time/publish", "payload/bytes",
    "payload/dropped_micro_batches", "payload/routing_missing_fraction",
}  # fmt: skip


def weights_of(path):
    state = load_file(f"{path}/model.safetensors")
    return torch.cat([state[name].flatten() for name in sorted(state)])


# ------------------------------------------------------------------------------------------------ one rank, in process


@pytest.fixture
def run_rank(arena):
    """run_rank(tree, resume, orchestrator's part): serve in this thread while the part runs beside it."""

    def run(tree, resume, part):
        ranks = Ranks("cpu")
        failure = []

        def beside():
            try:
                part()
            except BaseException as error:
                failure.append(error)
                raise

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            RankLoop(tree, ranks, arena, resume).serve()
        finally:
            ranks.close()
            thread.join(timeout=30)
        assert not failure

    return run


def train(orchestrator, arena, branches, steps, begin):
    def part():
        hello = orchestrator.greet()[0]
        assert hello["step"] == begin
        orchestrator.tell(kind="begin", version=begin, state={})
        assert orchestrator.expect("published")["version"] == begin
        for step in steps:
            rng = np.random.default_rng(step)
            samples = put(arena, [branches[i] for i in rng.permutation(len(branches))[:8]])
            orchestrator.ship("step", step, ship(arena, samples, ranks=1, step=step), state={"position": step})
            orchestrator.expect("published")
            orchestrator.expect("report")
            retire(arena, samples, 1)
        orchestrator.tell(kind="finish")

    return part


def test_a_resumed_rank_is_equal_bit_for_bit(make_tree, arena, branches, orchestrate, run_rank):
    tree = make_tree(scheduler={"kind": "cosine", "warmup_steps": 1}, keep_weights=9)
    orchestrator = orchestrate(tree)
    run_rank(tree, False, train(orchestrator, arena, branches, (1, 2, 3, 4), 0))
    straight = weights_of(tree.weights_dir(4))
    assert sorted(p.name for p in (tree.run.output_dir / "checkpoints").iterdir()) == ["step_2", "step_4"]

    for path in checkpoint_dir(tree, 4), tree.weights_dir(3), tree.weights_dir(4), tree.weights_dir(2):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    run_rank(tree, True, train(orchestrator, arena, branches, (3, 4), 2))
    assert torch.equal(weights_of(tree.weights_dir(4)), straight)
    assert tree.weights_dir(2).exists()  # `begin` writes what is missing


def test_what_a_warm_up_made_is_there_after_a_restart(make_tree, arena, branches, orchestrate, run_rank):
    made = make_tree(warmup={"steps": 1, "batch_size": 4})
    tree = made.model_copy(update={"run": made.run.model_copy(update={"restarts": Restarts(trainer=1)})})
    orchestrator = orchestrate(tree)

    def begin(hello, state):
        assert (hello["step"], hello["phase"], hello["report"]) == (0, "saved" if state else "new", None)
        if not state:
            demos = put(arena, [bare(branch, routing=False) for branch in branches[:4]])
            orchestrator.ship("warmup", 1, ship(arena, demos, ranks=1))
            orchestrator.expect("report")
            retire(arena, demos, 1)
        orchestrator.tell(kind="begin", version=0, state={"groups": 3})
        assert orchestrator.expect("published")["path"] == str(tree.weights_dir(0))
        orchestrator.tell(kind="finish")
        assert orchestrator.expect("finished")["rank"] == 0

    run_rank(tree, False, lambda: begin(orchestrator.greet()[0], {}))
    warmed = weights_of(checkpoint_dir(tree, 0))
    assert torch.equal(weights_of(tree.weights_dir(0)), warmed)
    assert not torch.equal(weights_of(tree.initial_weights), warmed)
    assert (checkpoint_dir(tree, 0) / "orchestrator.json").read_text() == '{"groups": 3}\n'
    shutil.rmtree(tree.weights_dir(0))
    run_rank(tree, True, lambda: begin(orchestrator.greet()[0], {"groups": 3}))
    assert torch.equal(weights_of(tree.weights_dir(0)), warmed)


def test_rank_0_broadcasts_what_it_has_published(make_tree, orchestrate, run_rank):
    tree = make_tree()
    inference = tree.inference.model_copy(update={"backend": "vllm", "weight_transfer": "broadcast"})
    tree = tree.model_copy(update={"inference": inference})
    orchestrator = orchestrate(tree)

    def part():
        port = orchestrator.greet()[0]["sender"]
        orchestrator.tell(kind="begin", version=0, state={})
        path = orchestrator.expect("published")["path"]
        (received,) = receive("127.0.0.1", port, "transfer", path, 1, 2, torch.device("cpu"))
        (file,) = tree.initial_weights.glob("*.safetensors")
        with os.fdopen(received, "rb") as arrived:
            assert arrived.read() == file.read_bytes()
        orchestrator.tell(kind="finish")

    run_rank(tree, False, part)


def test_messages_out_of_order_stop_the_rank(make_tree, arena, branches, orchestrate, run_rank):
    tree = make_tree()
    orchestrator = orchestrate(tree)

    def part():
        orchestrator.greet()
        orchestrator.tell(kind="step", step=3, micro_batches=[], state={})

    with pytest.raises(RunError, match="step 3 arrived after step 0"):
        run_rank(tree, False, part)
