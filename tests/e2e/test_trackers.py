"""The real TensorBoard and W&B (offline) beside a run and its continuation: one run, the names of metrics.jsonl."""

import pytest

from tests.support.runs import RUN, with_model

pytestmark = [pytest.mark.e2e, pytest.mark.interop, pytest.mark.timeout(300)]

BOTH = {"monitor.tensorboard": "true", "monitor.wandb.project": "shmrl-test", "monitor.wandb.mode": "offline"}


def test_both_have_every_step_of_a_run_and_of_its_continuation(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one = run(text=with_model(RUN), **BOTH, **{"run.max-steps": 2}).start()
    code, output = one.finish()
    assert code == 0, output
    identity = (one.output_dir / "wandb" / "shmrl-run-id").read_text()
    one.flags = [flag for flag in one.flags if "max-steps" not in flag] + ["--run.max-steps=3"]
    one.start("--resume")
    code, output = one.finish()
    assert code == 0, output
    assert "the run goes on" not in (one.output_dir / "logs" / "latest" / "orchestrator.log").read_text()
    written = EventAccumulator(str(one.output_dir / "tensorboard"))
    written.Reload()
    lines = {line["step"]: line for line in one.metrics()}
    for name in ("train/reward", "train/loss", "arena/used_bytes", "train/reward/words"):
        events = {event.step: event.value for event in written.Scalars(name)}
        assert events == pytest.approx({step: line[name] for step, line in lines.items() if step}), name
    cells = written.Tensors("rollouts")[-1].tensor_proto.string_val
    assert b"words" in cells
    offline = list((one.output_dir / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert len(offline) == 2  # two attempts, one run
    assert all(file.stat().st_size > 1000 for file in offline)
