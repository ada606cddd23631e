"""What a program can see and use in a sandbox, and how every limit ends it: by its name, with nothing left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from shmrl.env.sandbox import Limits, Sandbox, cgroups, problem
from shmrl.env.sandbox.bwrap import LARGEST
from shmrl.errors import ConfigError, EnvError
from tests.env.conftest import until

ROOT = Path(__file__).parents[3]
PROGRAM = "/tmp/program.py"


def processes_with(token):
    """Processes of this machine that have a word in their command line, by whatever parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(token in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def run_marked(box, source, **limits):
    """(outcome, what is left of it): the program and its children have a word of their own in their command line."""
    token = uuid.uuid4().hex
    argv = [sys.executable, "-I", PROGRAM, token]
    outcome = box.run(argv, files={PROGRAM: source.encode()}, limits=replace(box.limits, **limits))
    return outcome, processes_with(token)


LOOK_AROUND = """
import json, os, socket, sys
port = int(sys.stdin.read())
try:
    socket.create_connection(("127.0.0.1", port), timeout=5)
    refused = False
except ConnectionRefusedError:
    refused = True
status = dict(line.rstrip("\\n").split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
written = []
for path in ("/x", "/dev/x", "/dev/shm/x", "/etc/x", "/usr/x", "/proc/x", "/run/x", "/run/shmrl/init.py", sys.prefix + "/x", "/tmp/x"):
    try:
        open(path, "w").close()
        written.append(path)
    except OSError:
        pass
print(json.dumps({
    "shm": os.listdir("/dev/shm"), "refused": refused, "written": written, "environment": sorted(os.environ),
    "pids": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()), "interfaces": [n for _, n in socket.if_nameindex()],
    "uid": os.getuid(), "capabilities": [status[name] for name in ("CapPrm", "CapEff", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"], "tmp": os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize,
}))
"""  # noqa: E501


def test_inside_there_is_nothing_of_the_host(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = box.python(LOOK_AROUND, str(server.getsockname()[1]))
    assert outcome.ok, outcome
    seen = json.loads(outcome.stdout)
    assert seen["shm"] == []
    assert seen["refused"]
    assert seen["written"] == ["/tmp/x"]
    assert seen["environment"] == ["HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PWD"]
    assert seen["pids"] == [1, 2]
    assert seen["interfaces"] == ["lo"]
    assert seen["uid"] != 0
    assert set(seen["capabilities"]) == {"0" * 16}
    assert seen["no_new_privileges"] == "1"
    assert seen["tmp"] == box.limits.tmp


def test_a_program_gets_its_input_and_its_output_comes_back(box):
    outcome = box.python("import sys; print(sys.stdin.read()[::-1]); print('b', file=sys.stderr); sys.exit(3)", "äbc")
    assert (outcome.code, outcome.stdout, outcome.stderr, outcome.limit, outcome.ok) == (3, "cbä\n", "b\n", None, False)
    assert box.python("print(7)").ok


def test_text_that_utf8_cannot_hold_goes_in_as_it_is(box):
    outcome = box.python("print('\ud800')")
    assert (outcome.code, "SyntaxError" in outcome.stderr) == (1, True)
    assert box.python("import sys; print(sys.stdin.buffer.read())", "a\udc80").stdout == "b'a\\xed\\xb2\\x80'\n"


def test_arguments_that_are_too_long_are_told_with_their_size(box):
    with pytest.raises(EnvError, match=r"did not start: 20\d,\d+ B of arguments, 131,072 are too many"):
        box.run([sys.executable, "x" * 200_000])


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), 1 << 63, "1", None, True])
def test_limits_that_cannot_be_are_refused(value):
    for name in Limits.__dataclass_fields__:
        with pytest.raises(ConfigError, match=rf"limit {name} = {value!r}: it is a.* number above 0, at most [\d,]+"):
            Limits(**{name: value})
    with pytest.raises(ConfigError, match=r"limit memory = 1\.5: it is a whole number"):
        Limits(memory=1.5)


def test_the_largest_limits_can_be_set(box):
    assert box.python("print(1)", limits=Limits(**{**LARGEST, "processes": 32})).ok


ENDS = {
    "fork bomb": ("import os\nwhile True: os.fork()", {"wall_s": 60.0}, {"processes"}),
    "fork bomb that does not give up": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        {"wall_s": 1.0},
        {"processes"} if "pids" in cgroups.parents() else {"wall_s"},  # only a cgroup counts what was refused
    ),
    "threads": (
        "from threading import Thread; import time\n"
        "for _ in range(100): Thread(target=time.sleep, args=(60,), daemon=True).start()",
        {"wall_s": 60.0},
        {"processes"},
    ),
    "10 GB": ("bytearray(10 << 30)", {"wall_s": 60.0}, {"memory"}),
    "endless loop": ("while True: pass", {"wall_s": 60.0, "cpu_s": 1}, {"cpu_s"}),
    "endless wait": ("import time\nwhile True: time.sleep(60)", {"wall_s": 0.5}, {"wall_s"}),
    "setsid daemon": (
        "import os, signal\nif os.fork() == 0:\n  os.setsid()\n  os.fork()\n  signal.pause()",
        {"wall_s": 60.0},
        {"daemon"},
    ),
    "one large file": ("open('/tmp/x', 'wb').write(bytes(2 << 20))", {"file_size": 1 << 20}, {"file_size"}),
    "endless output": ("while True: print('x' * 4096)", {"wall_s": 60.0, "file_size": 1 << 20}, {"file_size"}),
    "many files": (
        "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))",
        {"tmp": 4 << 20},
        {"tmp"},
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_with_the_name_of_the_limit_and_nothing_is_left(name, box):
    source, limits, expected = ENDS[name]
    outcome, left = run_marked(box, source, **limits)
    assert outcome.limit in expected, outcome
    assert not outcome.ok
    assert left == []


def test_processes_share_the_memory_of_a_cgroup(box):
    if "memory" not in cgroups.parents():
        pytest.skip("no memory cgroup can be made here")
    source = (
        "import os, signal\nfor _ in range(3):\n  if os.fork() == 0: break\n"
        "held = bytearray(b'x' * (60 << 20))\nsignal.pause()"
    )
    outcome, left = run_marked(box, source, memory=100 << 20, tmp=1 << 20, wall_s=20.0)
    assert (outcome.limit, left) == ("memory", [])


def test_no_cgroup_is_left(box):
    box.python("")
    for parent in cgroups.parents().values():
        assert not [*parent.glob(f"shmrl-{os.getpid()}-*")]


async def test_the_sandbox_ends_with_the_process_that_waits(box):
    token = uuid.uuid4().hex
    script = (
        "import sys; from shmrl.env.sandbox import Limits, Sandbox\n"
        f"Sandbox().run([sys.executable, '-I', '-c', 'import signal; signal.pause()', '{token}'], "
        "limits=Limits(wall_s=600))"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as waiting:  # noqa: ASYNC220
        await until(lambda: len([p for p in processes_with(token) if p.pid != waiting.pid]) >= 3)
        waiting.send_signal(signal.SIGKILL)
    await until(lambda: not processes_with(token))

    def left():
        """Every next sandbox removes what the dead process had made, once the kernel has let go of what was in it."""
        return [group for parent in cgroups.parents().values() for group in parent.glob(f"shmrl-{waiting.pid}-*")]

    await until(lambda: not left())


def _system_python():
    """The system's own interpreter, if it is 3.11 or later."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        check = "import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix != sys.base_prefix)"
        if Path(path).exists() and subprocess.run([path, "-c", check], check=False).returncode == 0:
            return path
    return None


def _answer_of(interpreter, **popen):
    """(interpreter, uid, where it can write) as Python says in a sandbox that this interpreter starts."""
    inside = (
        "import ctypes, json, os, sys\n"
        "print(sys.executable, os.getuid(), *(d for d in ('/', '/dev', '/dev/shm', '/tmp') if os.access(d, os.W_OK)))"
    )
    script = (
        "from shmrl.env.sandbox import Sandbox; box = Sandbox(); box.check()\n"
        f"outcome = box.python({inside!r}); print(outcome.stdout, outcome.stderr)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(popen.get("cwd", ROOT))}
    done = subprocess.run(
        [interpreter, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60, **popen
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_it_works_from_a_venv(box, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    assert _answer_of(python)[::2] == [python, "/tmp"]


def test_it_works_from_a_system_interpreter(box):
    python = _system_python()
    if python is None:
        pytest.skip("this machine has no system Python 3.11 or later")
    assert _answer_of(python)[::2] == [python, "/tmp"]


def test_it_works_for_a_user_who_is_not_root(box):
    """Root's sandboxes have a real uid of their own; others have a user namespace."""
    python = _system_python()
    if os.geteuid() != 0 or python is None:
        pytest.skip("every other test here is about such a user, or there is no interpreter for one")
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are root's alone
        place = Path(directory)
        place.chmod(0o755)
        shutil.copytree(ROOT / "shmrl", place / "shmrl", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        assert _answer_of(python, cwd=place, user=65534, group=65534, extra_groups=[])[1:] == ["65534", "/tmp"]


def test_a_program_that_cannot_start_is_an_error_and_not_an_answer(box):
    with pytest.raises(EnvError, match="did not start: FileNotFoundError"):
        box.run(["/no/such/program"])


def test_the_limits_are_said(box):
    said = box.active()
    assert "10 s, 10 s of CPU, 1.0 GiB of memory per process" in said
    assert "files of 16.0 MiB, /tmp of 64.0 MiB" in said
    assert ("memory cgroup" in said) == ("memory" not in cgroups.parents())


# ------------------------------------------------------------------------------------------------ without bubblewrap


@pytest.fixture
def bwrap_is(tmp_path, monkeypatch):
    """`bwrap_is(script)` makes this the only bwrap on the path; `bwrap_is(None)`: there is none."""

    def install(script):
        if script is not None:
            path = tmp_path / "bwrap"
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_a_missing_bwrap_is_refused_with_the_command_that_installs_it(bwrap_is):
    bwrap_is(None)
    assert problem() == (
        "serve.sandbox = 'bwrap': bubblewrap is not installed: apt-get install -y bubblewrap (Debian, Ubuntu), "
        "dnf install bubblewrap (Fedora, RHEL)"
    )
    with pytest.raises(ConfigError, match="apt-get install -y bubblewrap"):
        Sandbox(Limits())


def test_an_old_bwrap_is_refused(bwrap_is):
    bwrap_is("echo bubblewrap 0.6.1")
    with pytest.raises(ConfigError, match=r"is bubblewrap 0\.6\.1; 0\.7 or later is needed"):
        Sandbox()


def test_a_machine_without_namespaces_is_refused_with_bwraps_words(bwrap_is):
    bwrap_is(
        "[ $1 = --version ] && echo bubblewrap 0.9.0 && exit\necho 'No permissions to create new namespace' >&2\nexit 1"
    )
    with pytest.raises(ConfigError, match="does not work here: the sandbox did not start: No permissions to create"):
        Sandbox().check()
