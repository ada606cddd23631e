"""The orchestrator as its own process, among real env servers, a real arena, ranks that assemble, and an engine that
answers by the book: everything it did is in its files, and nothing is left."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from shmrl.arena import Arena
from shmrl.config import dump_toml, env_server_from, load_run
from tests.support.clock import wait_until
from tests.support.fake_engine import FakeEngine
from tests.support.runs import free_ports

ROOT = Path(__file__).parents[2]
CONFIG = """
[run]
name = "orc"
max_steps = 3
[model]
path = "MODEL"
[inference]
urls = ["URL"]
max_model_len = 256
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 256
connect_timeout_s = 60
filters = { zero_advantage = false }
[[orchestrator.train.source]]
name = "words"
env = { id = "reverse-text", args = { min_length = 2, max_length = 4 } }
sampling = { top_p = 0.95, top_k = 32, max_tokens = 8 }
[trainer]
ranks = 2
head = 4
"""
TWO_MORE = """
[[orchestrator.train.source]]
name = "sorted"
env = { id = "alphabet-sort" }
sampling = { top_p = 0.95, top_k = 32, max_tokens = 8 }
[[orchestrator.eval.source]]
name = "held"
env = { id = "reverse-text", args = { min_length = 2, max_length = 4 } }
sampling = { max_tokens = 8 }
interval = 2
num_examples = 5
"""


class Site:
    """One run's processes around the orchestrator, in one output directory; `async with` starts the env servers."""

    def __init__(self, directory, model, engine, text=CONFIG, capacity="64MiB", **flags):
        self.out, self.engine, self.children = directory / "out", engine, []
        self.out.mkdir()
        spill_dir = flags.get("arena__spill_dir")
        self.arena = Arena.create(capacity=capacity, run_id="orc", spill_dir=spill_dir)
        (directory / "token").write_text("0123456789abcdef" * 2)
        source = directory / "run.toml"
        source.write_text(text.replace("MODEL", str(model)).replace("URL", engine.url))
        given = {
            "run.output-dir": f'"{self.out}"', "arena.address": f'"{self.arena.address}"',
            "arena.token-file": f'"{directory}/token"', "orchestrator.env-server-base-port": str(free_ports(4)),
        }  # fmt: skip
        self.tree = load_run([source], given | {key.replace("__", "."): value for key, value in flags.items()})
        self.file = directory / "resolved.toml"
        self.file.write_text(dump_toml(self.tree))

    async def __aenter__(self):
        for index in range(len(self.tree.sources)):
            file = self.file.with_name(f"env{index}.toml")
            file.write_text(dump_toml(env_server_from(self.tree, index)))
            await self.spawn("-m", "shmrl", "env-server", file)
        return self

    async def __aexit__(self, *exc):
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
                child.send_signal(signal.SIGCONT)
        for child in self.children:
            await asyncio.wait_for(child.communicate(), 20)
        self.arena.close()
        self.arena.unlink()
        self.tree.socket_dir.joinpath("trainer.sock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.tree.socket_dir.rmdir()

    async def spawn(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{self.file.parent}", "OMP_NUM_THREADS": "1"}
        child = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, arguments), env=environment, cwd=self.file.parent,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self.children.append(child)
        return child

    async def ranks(self, step=0):
        return [
            await self.spawn("-m", "tests.orchestrator.fake_rank", self.file, rank, step)
            for rank in range(self.tree.trainer.ranks)
        ]

    async def orchestrate(self, *options, step=0):
        """Ranks and orchestrator from start to end: (exit code, output)."""
        ranks = await self.ranks(step)
        process = await self.spawn("-m", "shmrl", "orchestrator", self.file, *options)
        output, _ = await asyncio.wait_for(process.communicate(), 200)
        for rank in ranks:
            if process.returncode == 0:
                await asyncio.wait_for(rank.communicate(), 20)
            elif rank.returncode is None:
                rank.kill()
        return process.returncode, output.decode()

    def lines(self, name):
        return [json.loads(line) for line in (self.out / name).read_text().splitlines()]


async def said(process, text):
    """Read what a process says up to a line with `text`."""
    seen = b""
    while text.encode() not in (line := await asyncio.wait_for(process.stdout.readline(), 60)):
        assert line, f"it ended without saying {text!r}: {(seen + line).decode()}"
        seen += line


async def test_three_steps_two_sources_one_evaluation_and_nothing_left(tmp_path, model_dir):
    async with (
        FakeEngine(abort_every=7) as engine,
        Site(tmp_path, model_dir, engine, CONFIG + TWO_MORE, orchestrator__max_off_policy_steps="0") as site,
    ):
        code, output = await site.orchestrate()
        assert code == 0, output
        stats = site.arena.stats()
        assert (stats["blocks"], stats["created"]) == (0, stats["freed"])
        metrics = site.lines("metrics.jsonl")
        assert [line["step"] for line in metrics] == [0, 1, 2, 3]
        assert [("eval/held/reward" in line) for line in metrics] == [True, False, True, True]
        assert engine.loaded == [str(site.tree.weights_dir(version)) for version in range(4)]

        last = metrics[-1]
        assert last["train/loss"] == 0.5
        assert {"train/reward/words", "train/reward/sorted"} <= {key for line in metrics for key in line}
        assert {
            "env/words/rss_bytes",
            "env/sorted/rss_bytes",
            "env/held/rss_bytes",
            "orchestrator/rss_anon_bytes",
        } <= set(last)
        assert all(line["off_policy/max"] == 0 for line in metrics[1:])
        assert all(line["episodes/shipped"] + line["episodes/filtered"] >= 8 for line in metrics[1:])
        assert all(0 < line["orchestrator/bytes_per_sample"] <= 1024 for line in metrics[1:])

        ranks = [site.lines(f"rank_{rank}.jsonl") for rank in range(2)]
        for one, other in zip(*ranks, strict=True):
            assert one["micro_batches"] == other["micro_batches"]
            assert one["assembled_loss_tokens"] + other["assembled_loss_tokens"] == one["loss_tokens"]
            assert set(one["lags"] + other["lags"]) == {0}
            assert one["fields"] == ["head", "mask", "routing"]
        rollout = site.lines("rollouts/step_1.jsonl")[0]
        assert [message["role"] for message in rollout["messages"]][-2:] == ["user", "assistant"]
        assert rollout["version_start"] == 0
        assert "step 3/3 | " in output


async def test_one_step_of_lag_is_used_and_kept(tmp_path, model_dir):
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine, run__max_steps="5") as site:
        code, output = await site.orchestrate()
        assert code == 0, output
        lags = [lag for rank in range(2) for line in site.lines(f"rank_{rank}.jsonl") for lag in line["lags"]]
        assert 0 <= min(lags) <= max(lags) <= 1
        assert [line["episodes/shipped"] for line in site.lines("metrics.jsonl")] == [8] * 5
        assert site.arena.stats()["blocks"] == 0


async def test_the_warm_up_comes_first_and_its_samples_have_weight_only(tmp_path, model_dir):
    flags = {"warmup__steps": "2", "warmup__batch_size": "6", "run__max_steps": "1"}
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine, **flags) as site:
        code, output = await site.orchestrate()
        assert code == 0, output
        lines = site.lines("rank_0.jsonl")
        assert [(line["kind"], line["step"]) for line in lines] == [("warmup", 1), ("warmup", 2), ("step", 1)]
        assert {advantage for line in lines[:2] for advantage in line["advantages"]} == {0.0}
        assert all(line["assembled_loss_tokens"] > 0 for line in lines)
        assert [line["step"] for line in site.lines("metrics.jsonl")] == [1]
        assert "warm-up step 2/2 | loss 0.5000" in output
        assert site.arena.stats()["blocks"] == 0


async def test_a_signal_drains_and_a_resumed_run_goes_on_with_the_same_servers(tmp_path, model_dir):
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine, run__max_steps="5000") as site:
        ranks = await site.ranks()
        process = await site.spawn("-m", "shmrl", "orchestrator", site.file)
        await said(process, "step 3/")
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 130, output.decode()
        for rank in ranks:
            await asyncio.wait_for(rank.communicate(), 20)
        assert site.arena.stats()["blocks"] == 0
        (checkpoint,) = (site.out / "checkpoints").iterdir()
        step = int(checkpoint.name.removeprefix("step_"))
        assert [line["step"] for line in site.lines("metrics.jsonl")] == list(range(1, step + 1))
        state = json.loads((checkpoint / "orchestrator.json").read_text())
        assert state["positions"] == {"words": state["groups"]}

        site.file.write_text(dump_toml(site.tree).replace("max_steps = 5000", f"max_steps = {step + 2}"))
        code, output = await site.orchestrate("--resume", step=step)
        assert code == 0, output
        assert [line["step"] for line in site.lines("metrics.jsonl")] == list(range(1, step + 3))
        assert engine.loaded[-3:] == [str(site.tree.weights_dir(version)) for version in range(step, step + 3)]
        assert site.arena.stats()["blocks"] == 0


async def test_the_second_signal_stops_at_once(tmp_path, model_dir):
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine, run__max_steps="5000") as site:
        ranks = await site.ranks()
        process = await site.spawn("-m", "shmrl", "orchestrator", site.file)
        await said(process, "step 1/")
        ranks[0].send_signal(signal.SIGSTOP)  # the step being trained will not end
        process.send_signal(signal.SIGTERM)
        await said(process, "draining")
        process.send_signal(signal.SIGTERM)
        output, _ = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == -signal.SIGTERM, output.decode()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # the other one has lost its blocks, and said so
                rank.kill()

        def empty():  # once the env server has heard of the end
            site.arena.sweep()
            return site.arena.stats()["blocks"] == 0

        await asyncio.to_thread(wait_until, empty, 20.0)


async def test_a_signal_before_the_first_step_stops_at_once(tmp_path, model_dir):
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine) as site:
        process = await site.spawn("-m", "shmrl", "orchestrator", site.file)
        await asyncio.to_thread(wait_until, site.tree.socket_dir.joinpath("trainer.sock").exists, 30.0)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == -signal.SIGINT, output.decode()


async def test_ranks_that_stand_elsewhere_are_refused(tmp_path, model_dir):
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine) as site:
        code, output = await site.orchestrate(step=4)
        assert code == 1
        assert "the trainer stands at step 4, and this run was not started with --resume" in output


async def test_masks_that_never_come_stop_the_run_at_the_first_sample(tmp_path, model_dir):
    async with FakeEngine(masks=False) as engine, Site(tmp_path, model_dir, engine) as site:
        code, output = await site.orchestrate()
        assert code == 1
        assert "source 'words': its first sample (orc/words/" in output
        assert "lacks a field that the run trains with: mask: no kept ids at position" in output
        assert site.lines("metrics.jsonl") == []
        assert site.arena.stats()["blocks"] == 0


async def test_a_task_set_that_raises_fails_the_run_with_its_place(tmp_path, model_dir):
    (tmp_path / "broken_env.py").write_text(
        "from shmrl.env import Environment\n"
        "class Env(Environment):\n"
        "    def tasks(self, split):\n        raise KeyError('no-such-split')\n"
        "    async def rollout(self, task, model): ...\n"
    )
    text = CONFIG.replace('id = "reverse-text", args = { min_length = 2, max_length = 4 }', 'id = "broken_env:Env"')
    async with FakeEngine() as engine, Site(tmp_path, model_dir, engine, text) as site:
        code, output = await site.orchestrate()
        assert code == 1
        assert "shmrl: error: broken_env:Env: KeyError: 'no-such-split' (" in output
        assert "broken_env.py:4, in tasks)\n" in output
