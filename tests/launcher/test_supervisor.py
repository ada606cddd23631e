"""Start, watch and tear down, on fake roles: real processes, real signals, a launcher in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shmrl.monitor.log import tail
from tests.support import leftovers
from tests.support.clock import wait_until

FAKE = Path(__file__).with_name("fake_launcher.py")
ROOT = FAKE.parents[2]
SERVE = "import os, pathlib, time; pathlib.Path('{0}').write_text(str(os.getpid())); time.sleep(600)"


class Launcher:
    """The fake launcher's process, its directory, and the pid files its roles write."""

    def __init__(self, directory, *roles):
        self.directory = directory
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE), str(directory), *(text.replace("DIR", str(directory)) for text in roles)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def pid(self, name):
        file = self.directory / f"{name}.pid"
        return int(wait_until(lambda: file.exists() and file.read_text(), what=f"{name} running"))

    def finish(self, timeout_s=20):
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(*roles):
        started.append(Launcher(tmp_path, *roles))
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()


def server(name, flags=""):
    return f"{name}|{flags}|" + SERVE.format(f"DIR/{name}.pid")


def gone(*pids):
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what=f"{pids} gone")


def test_the_run_ends_with_zero_when_the_final_roles_have_finished_and_servers_are_stopped(launch):
    launcher = launch(server("env"), "orchestrator|fd|pass", "trainer|f|import time; time.sleep(0.2)")
    code, output = launcher.finish()
    assert code == 0, output
    assert "Outcome(code=0, status='finished', reason='', orderly=True)" in output
    gone(launcher.pid("env"))


def test_the_first_role_runs_alone_and_its_failure_starts_nothing(launch, tmp_path):
    launcher = launch("first||raise SystemExit(4)", server("env"), "orchestrator|fd|pass")
    code, output = launcher.finish()
    assert (code, "first exited with code 4" in output) == (1, True), output
    assert not (tmp_path / "env.pid").exists()


def test_a_failure_names_role_code_last_twenty_lines_and_log(launch, tmp_path):
    noise = "[print('line', i) for i in range(30)]; raise SystemExit(7)"
    launcher = launch(server("env"), f"trainer|f|{noise}", server("orchestrator", "fd"))
    code, output = launcher.finish()
    assert code == 1
    assert "trainer exited with code 7" in output
    assert f"last lines of {tmp_path}/trainer.log:\n  | line 10\n" in output
    assert "  | line 29\n" in output
    assert "line 9\n" not in output


def test_a_signal_that_killed_a_role_is_named(launch):
    launcher = launch(server("engine"), server("orchestrator", "fd"))
    os.kill(launcher.pid("engine"), signal.SIGKILL)
    code, output = launcher.finish()
    assert (code, "engine exited with code -9 (killed by SIGKILL)" in output) == (1, True), output


ENGINE = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("DIR/engine.new").write_text(" ".join([str(os.getpid()), str(child.pid), *sys.argv[1:]]))
os.rename("DIR/engine.new", "DIR/engine.pid")
time.sleep(600)
"""


def test_a_role_with_a_budget_is_started_again_and_its_children_are_not_left(launch, tmp_path):
    launcher = launch(f"engine|r|{ENGINE}", server("orchestrator", "fd"))
    pids = tmp_path / "engine.pid"

    def other_than(pid):
        found = pids.read_text().split() if pids.exists() else []
        return found if found and found[0] != pid else None

    first, below = wait_until(lambda: other_than(""), what="the engine")
    os.kill(int(first), signal.SIGKILL)
    second, _, option = wait_until(lambda: other_than(first), what="another engine")
    assert option == "--again"
    gone(int(first), int(below))
    os.kill(int(second), signal.SIGKILL)
    code, output = launcher.finish()
    assert code == 1
    assert "restarting engine (1 of 1)" in output
    assert "Outcome(code=1, status='failed', reason='engine exited with code -9 (killed by SIGKILL)'" in output


ON_DEMAND = """
import os, pathlib, socket, sys, time
taken, _ = socket.socket(fileno=int(sys.argv[1])).accept()
taken.sendall(str(os.getpid()).encode())
taken.close()
pathlib.Path("DIR/answered").touch()
time.sleep(600)
"""


def test_a_role_on_demand_is_started_by_a_connection_and_its_end_changes_nothing(launch, tmp_path):
    waits = "import pathlib, time\nwhile not pathlib.Path('DIR/over').exists(): time.sleep(0.02)"
    launcher = launch(f"page|l|{ON_DEMAND}", server("env"), f"orchestrator|fd|{waits}")
    launcher.pid("env")
    assert not (tmp_path / "page.log").exists()  # nobody has looked
    port = int((tmp_path / "page.port").read_text())

    def ask():
        with socket.create_connection(("127.0.0.1", port), timeout=20) as asking:
            return int(asking.recv(32))

    first = ask()
    os.kill(first, signal.SIGKILL)
    second = ask()  # waits in the backlog until there is another
    assert second != first
    (tmp_path / "over").touch()
    code, output = launcher.finish()
    assert code == 0, output
    assert "page exited with code -9 (killed by SIGKILL); the run goes on" in output
    gone(second)


def test_a_role_whose_failure_is_seen_after_the_orchestrators_is_the_cause(launch):
    late = "import time; time.sleep(0.5); raise SystemExit(3)"
    code, output = launch(server("env"), "orchestrator|fd|raise SystemExit(1)", f"trainer|f|{late}").finish()
    assert code == 1
    assert "orchestrator exited with code 1" in output
    assert "Outcome(code=1, status='failed', reason='trainer exited with code 3'," in output


def test_a_server_that_exits_with_zero_is_a_failure_too(launch):
    code, output = launch("env||pass", server("orchestrator", "fd")).finish()
    assert (code, "env exited with code 0" in output) == (1, True), output


def test_roles_that_ignore_sigterm_and_children_in_other_sessions_are_killed(launch, tmp_path):
    child = SERVE.format("DIR/child.pid")
    stubborn = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f'subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True); ' + SERVE.format("DIR/env.pid")
    )
    launcher = launch(f"env||{stubborn}", server("orchestrator", "fd"))
    pids = launcher.pid("env"), launcher.pid("child")
    os.kill(launcher.pid("orchestrator"), signal.SIGKILL)
    code, output = launcher.finish()
    assert code == 1, output
    gone(*pids)


def test_first_ctrl_c_drains_and_the_run_ends_with_130(launch, tmp_path):
    drain = (
        "import os, pathlib, signal, sys, time; "
        "signal.signal(signal.SIGINT, lambda *_: (pathlib.Path('DIR/drained').touch(), sys.exit(130))); "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
        + SERVE.format("DIR/orchestrator.pid").removeprefix("import os, pathlib, time; ")
    )
    trainer = "import pathlib, time\nwhile not pathlib.Path('DIR/drained').exists(): time.sleep(0.02)"
    launcher = launch(server("env"), f"orchestrator|fd|{drain}", f"trainer|f|{trainer}")
    launcher.pid("orchestrator")
    launcher.process.send_signal(signal.SIGINT)
    code, output = launcher.finish()
    assert code == 130, output
    assert "status='interrupted', reason='stopped by Ctrl-C after draining" in output


def test_ctrl_c_before_there_is_a_step_to_finish_ends_the_run_with_130(launch):
    dies = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    dies += "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); " + SERVE.format("DIR/orchestrator.pid")
    launcher = launch(server("env"), f"orchestrator|fd|{dies}", server("trainer", "f"))
    launcher.pid("orchestrator"), launcher.pid("trainer")
    launcher.process.send_signal(signal.SIGINT)
    code, output = launcher.finish()
    assert (code, "reason='stopped by Ctrl-C before there was a step to finish" in output) == (130, True), output


def test_second_ctrl_c_stops_at_once(launch):
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + SERVE.format("DIR/orchestrator.pid")
    launcher = launch(server("env"), f"orchestrator|fd|{deaf}")
    launcher.pid("orchestrator"), launcher.pid("env")
    launcher.process.send_signal(signal.SIGINT)
    wait_until(lambda: launcher.process.stdout.readline().startswith("Ctrl-C"), what="drain announced")
    launcher.process.send_signal(signal.SIGINT)
    code, output = launcher.finish()
    assert (code, "reason='stopped by Ctrl-C; continue" in output) == (130, True), output


def test_ctrl_c_while_the_one_that_drains_is_loaded_waits_until_it_listens(launch, tmp_path):
    """It comes the moment the process exists, long before a line of its own code has run."""
    listens = (
        "import os, pathlib, signal, sys, time; pathlib.Path('DIR/orchestrator.pid').write_text(str(os.getpid())); "
        "assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []); "
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); "
        "[time.sleep(0.01) for _ in iter(lambda: signal.SIGINT in signal.sigpending(), True)]; "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); sys.exit(9)"
    )
    launcher = launch("orchestrator|fd|" + listens, "trainer|f|import time; time.sleep(0)")
    launcher.pid("orchestrator")
    launcher.process.send_signal(signal.SIGINT)
    code, output = launcher.finish()
    assert (code, "Traceback" in output) == (130, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_with_its_number(launch, number):
    launcher = launch(server("env"), server("orchestrator", "fd"))
    launcher.pid("orchestrator"), launcher.pid("env")
    launcher.process.send_signal(number)
    code, output = launcher.finish()
    assert (code, f"stopped by {number.name}" in output) == (128 + number, True), output


def test_kill_of_the_launcher_leaves_nothing(launch, tmp_path):
    (tmp_path / "sockets").mkdir()
    (tmp_path / "sockets" / "trainer.sock").touch()
    (tmp_path / "run.json").write_text('{"status": "running", "exit_code": null}')
    child = SERVE.format("DIR/rank.pid")
    parent = (
        f'import subprocess, sys; subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True); '
        + SERVE.format("DIR/trainer.pid")
    )
    launcher = launch(server("env"), f"trainer|f|{parent}", server("orchestrator", "fd"))
    pids = [launcher.pid(name) for name in ("env", "trainer", "orchestrator", "rank", "janitor")]
    launcher.process.kill()
    gone(*pids)
    assert not (tmp_path / "sockets").exists()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record == {"status": "killed", "exit_code": 137, "reason": "the launcher was killed"}


def test_an_exception_in_the_launcher_leaves_nothing(launch, tmp_path):
    launcher = launch(server("env"), server("orchestrator", "fd"))
    pids = [launcher.pid(name) for name in ("env", "orchestrator", "janitor")]
    (tmp_path / "raise").touch()
    code, output = launcher.finish()
    assert (code, "RuntimeError: the tick raised" in output) == (1, True), output
    gone(*pids)


def test_kill_of_the_janitor_ends_the_run_with_one(launch):
    launcher = launch(server("env"), server("orchestrator", "fd"))
    env = launcher.pid("env")
    os.kill(launcher.pid("janitor"), signal.SIGKILL)
    code, output = launcher.finish()
    assert (code, "the janitor (pid" in output) == (1, True), output
    gone(env)


def test_a_stopped_janitor_does_not_hold_the_end_of_a_run(launch):
    until_told = "import pathlib, time\nwhile not pathlib.Path('DIR/go').exists(): time.sleep(0.02)"
    launcher = launch(server("env"), f"orchestrator|fd|{until_told}")
    janitor = launcher.pid("janitor")
    os.kill(janitor, signal.SIGSTOP)
    launcher.pid("env")
    (launcher.directory / "go").touch()
    code, output = launcher.finish()
    assert code == 0, output
    gone(janitor)


def test_the_janitor_is_small_and_survives_signals(launch, tmp_path):
    launcher = launch(server("orchestrator", "fd"))
    janitor = psutil.Process(launcher.pid("janitor"))
    launcher.pid("orchestrator")
    wait_until(lambda: (tmp_path / "ticks").exists(), what="a tick")
    janitor.terminate()
    janitor.send_signal(signal.SIGINT)
    assert janitor.memory_info().rss < 24 << 20
    assert not any("torch" in mapped.path or "numpy" in mapped.path for mapped in janitor.memory_maps())
    assert janitor.is_running()
    launcher.process.kill()
    gone(janitor.pid, launcher.pid("orchestrator"))


def test_children_have_one_thread_and_keep_their_mark_under_a_new_title(launch, tmp_path):
    titled = (
        "import os, setproctitle; setproctitle.setproctitle('shmrl:env'); "
        "open('DIR/threads', 'w').write(os.environ['OMP_NUM_THREADS']); " + SERVE.format("DIR/env.pid")
    )
    launcher = launch(f"env||{titled}", server("orchestrator", "fd"))
    pid = launcher.pid("env")
    assert psutil.Process(pid) in leftovers.processes()
    assert (tmp_path / "threads").read_text() == "1"
    launcher.process.kill()
    gone(pid)


def test_the_tail_reaches_back_to_a_traceback_and_stops_before_torchs_report(tmp_path):
    path = tmp_path / "trainer.log"
    traceback = ["Traceback (most recent call last):", *(f"  frame {i}" for i in range(40)), "RunError: no batch"]
    elastic = ["E1129 9762 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0"]
    path.write_text("\n".join(["early"] * 50 + traceback))
    assert tail(path) == traceback
    report = ["Traceback (most recent call last):", *["  launcher"] * 30, "ChildFailedError"]
    path.write_text("\n".join(["early"] * 50 + traceback + elastic + report))
    assert tail(path) == traceback + elastic


# ------------------------------------------------------------------------------------- a node of a run over several


def test_spare_roles_are_gone_one_by_one_and_the_last_one_ends_the_node(launch):
    launcher = launch(server("node"), server("a", "s"), server("b", "s"))
    a, b = launcher.pid("a"), launcher.pid("b")
    os.kill(a, signal.SIGKILL)
    gone(a)
    ticks = launcher.directory / "ticks"
    seen = len(ticks.read_text()) if ticks.exists() else 0
    wait_until(lambda: ticks.exists() and len(ticks.read_text()) > seen + 1, what="the launcher going on")
    os.kill(b, signal.SIGKILL)
    code, output = launcher.finish()
    assert code == 1
    assert "a is gone for good; the others go on" in output
    assert "reason='b exited with code -9 (killed by SIGKILL)'" in output


def test_a_role_that_is_not_spare_ends_the_node(launch):
    launcher = launch(server("node"), server("a", "s"))
    launcher.pid("a")
    os.kill(launcher.pid("node"), signal.SIGKILL)
    code, output = launcher.finish()
    assert (code, "node exited with code -9" in output) == (1, True)


def test_a_spare_role_is_restarted_first(launch):
    launcher = launch(server("node"), server("a", "sr"))
    first = launcher.pid("a")
    (launcher.directory / "a.pid").unlink()
    os.kill(first, signal.SIGKILL)
    assert launcher.pid("a") != first
    (launcher.directory / "told").touch()
    code, output = launcher.finish()
    assert code == 0, output
    assert "reason='told'" in output


def test_more_roles_start_when_what_they_need_is_there(launch):
    launcher = launch(server("node"), "orchestrator|fda|pass", "trainer|fa|pass")
    launcher.pid("node")
    assert not (launcher.directory / "orchestrator.log").exists()
    (launcher.directory / "later").touch()
    code, output = launcher.finish()
    assert code == 0, output


def test_what_never_comes_ends_the_run(launch):
    launcher = launch(server("node"), "orchestrator|fda|pass")
    launcher.pid("node")
    (launcher.directory / "later").write_text("no")
    code, output = launcher.finish()
    assert (code, "reason='nothing comes'" in output) == (1, True)
    gone(launcher.pid("node"))


WRITES = """
import os, pathlib, signal, time
pathlib.Path('DIR/trainer.pid').write_text(str(os.getpid()))
while not pathlib.Path('DIR/ending').exists(): time.sleep(0.01)
pathlib.Path('DIR/written').touch()
pathlib.Path('DIR/flushing').unlink()
time.sleep(600)
"""


def test_a_checkpoint_that_is_being_written_is_finished_before_the_end(launch):
    launcher = launch("orchestrator|fd|" + SERVE.format("DIR/orchestrator.pid"), "trainer|f|" + WRITES)
    (launcher.directory / "flushing").touch()
    launcher.pid("trainer")
    os.kill(launcher.pid("orchestrator"), signal.SIGKILL)
    code, output = launcher.finish()
    assert code == 1
    assert "a checkpoint may be written: the trainer has 10 s" in output
    assert (launcher.directory / "written").exists()
    assert "orchestrator exited with code -9" in (launcher.directory / "ending").read_text()


def test_a_request_to_drain_is_the_first_ctrl_c(launch):
    drains = "import signal, pathlib, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); "
    drains += "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    launcher = launch("orchestrator|fd|" + drains + SERVE.format("DIR/orchestrator.pid"))
    launcher.pid("orchestrator")
    (launcher.directory / "drain").touch()
    code, output = launcher.finish()
    assert code == 130
    assert "runs/x/drain: finishing the step and writing a checkpoint; press Ctrl-C to stop at once" in output
    assert "stopped by runs/x/drain after draining" in output
