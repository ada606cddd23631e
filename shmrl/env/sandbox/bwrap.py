"""`Sandbox`: one program in one bubblewrap sandbox, blocking, safe to call from many threads.

Runs in the env workers (and once in the env server, as a check). Inside there are the system's and the interpreter's
files, read-only, an empty /tmp of bounded size, and nothing else: no network, no host processes, no /dev/shm, no
environment variables, no capabilities. The program gets a uid of its own, because limits on processes count per uid and
do not bite root:

    root           bwrap unshares everything but the user namespace, and `init.py` sets a real uid that nobody has
    anybody else   a user namespace of its own (`--unshare-all`), in which this user's uid is counted anew

Three things end a sandbox, and each takes every process in it along: the program's end, the wall clock, and the end of
the thread that waits here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmrl.env.sandbox import cgroups
from shmrl.errors import ConfigError, EnvError
from shmrl.units import size

INSTALL = "apt-get install -y bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora, RHEL)"
OLDEST = (0, 7)
"""The first bwrap whose --tmpfs takes a size."""
NO_USERNS = (0, 8)
"""The first bwrap with --disable-userns."""
FIRST_UID, UIDS = 0x7000_0000, 1 << 28
"""Uids for root's sandboxes: above those of people, containers and services (systemd's table of uids)."""
OVERHEAD = 32 << 20
"""Memory of bwrap and `init.py`, which a memory cgroup counts."""
LARGEST = {
    "wall_s": 1_000_000,  # poll() takes milliseconds as an int
    "cpu_s": 1_000_000,
    "memory": 1 << 60,
    "processes": 4_000_000,  # pids.max: below 1 << 22
    "file_size": 1 << 60,
    "tmp": 1 << 60,
}
"""Of each limit. The hard limits of the machine may be lower still."""
ORDER_MOST = 128 << 10
"""Bytes of one argument, which Linux takes less than."""
INIT = "/run/shmrl/init.py"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_SYMPTOMS = {
    "memory": r"^MemoryError|std::bad_alloc|Cannot allocate memory",
    "processes": r"Resource temporarily unavailable|can't start new thread",
    "file_size": r"\[Errno 27\]|File too large",
    "tmp": r"\[Errno 28\]|No space left on device",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use; sizes in bytes. The names are those of `Outcome.limit`.

    Attributes:
        wall_s: seconds from start to end. cpu_s: seconds of CPU time of each process.
        memory: address space of each process; with a memory cgroup also what all of them use together, /tmp included.
        processes: processes and threads at a time. file_size: of one file, and of stdout and stderr each.
        tmp: all of /tmp.
    Raises ConfigError for a limit that the kernel cannot hold.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory: int = 1 << 30
    processes: int = 32
    file_size: int = 16 << 20
    tmp: int = 64 << 20

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            value = getattr(self, name)
            kind = (int, float) if name == "wall_s" else int
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value <= most:
                what = "a number" if name == "wall_s" else "a whole number"
                raise ConfigError(f"a sandbox's limit {name} = {value!r}: it is {what} above 0, at most {most:,}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        code: exit code, -signal, or None where the sandbox was ended from outside (wall_s, memory).
        limit: what ended it: a name of `Limits`; "daemon" for processes that outlived the program; else None.

    Example: Outcome(1, "", "...MemoryError", "memory", 0.08)
    """

    code: int | None
    stdout: str
    stderr: str
    limit: str | None
    duration_s: float

    @property
    def ok(self) -> bool:
        """Exit code 0, within every limit."""
        return self.code == 0 and self.limit is None


def problem() -> str | None:
    """Why there can be no sandbox on this machine, as one sentence with what to do; None if bwrap is there."""
    path = shutil.which("bwrap")
    if path is None:
        return f"serve.sandbox = 'bwrap': bubblewrap is not installed: {INSTALL}"
    if _version(path) < OLDEST:
        found, oldest = (".".join(map(str, version)) for version in (_version(path), OLDEST))
        return f"serve.sandbox = 'bwrap': {path} is bubblewrap {found}; {oldest} or later is needed"
    return None


class Sandbox:
    """Runs programs. `limits` are for those that bring none of their own.

    Raises ConfigError where bwrap is missing or too old.

    Example:
        >>> Sandbox().python("print(6 * 7)").stdout
        '42\\n'
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        found = problem()
        if found is not None:
            raise ConfigError(found)
        self.limits, self._bwrap = limits, str(shutil.which("bwrap"))
        self._version = _version(self._bwrap)
        self._cgroups = cgroups.parents()
        self._uids = _uids() if os.geteuid() == 0 else None
        self._counted = self._uids is not None or _kernel() >= (5, 14)  # before, namespaces shared one count per user
        self._init = Path(__file__).with_name("init.py").read_bytes()
        self._view = [*self._isolation(), *_files(), "--remount-ro", "/dev", "--remount-ro", "/"]

    def check(self) -> None:
        """Run nothing in a sandbox. ConfigError, with bwrap's own words, where this machine does not allow it."""
        try:
            outcome = self.python("")
        except EnvError as error:
            raise ConfigError(f"serve.sandbox = 'bwrap' does not work here: {error}") from None
        if not outcome.ok:
            raise ConfigError(
                f"serve.sandbox = 'bwrap' does not work here: {sys.executable} ended with {outcome.code}, limit "
                f"{outcome.limit}: {outcome.stderr.strip()[-500:]}"
            )

    def active(self) -> str:
        """Which limits hold here, as one line."""
        limits = self.limits
        together = f"{size(limits.memory)} of memory per process"
        together += " and in all (cgroup)" if "memory" in self._cgroups else " (no memory cgroup: not in all)"
        kinds = ["rlimit"] * self._counted + ["cgroup"] * ("pids" in self._cgroups)
        processes = f"{limits.processes} processes ({', '.join(kinds)})" if kinds else "any number of processes"
        who = "a uid of its own" if self._uids else "a user namespace"
        return (
            f"bubblewrap {'.'.join(map(str, self._version))} with {who}: {limits.wall_s:g} s, {limits.cpu_s} s of CPU, "
            f"{together}, {processes}, files of {size(limits.file_size)}, /tmp of {size(limits.tmp)}"
        )

    def python(self, source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run Python source with this interpreter and the packages of its environment.

        What UTF-8 cannot hold, a lone surrogate, goes in as it is: Python calls such a source a SyntaxError.
        """
        program = "/tmp/program.py"
        return self.run([sys.executable, "-I", program], stdin, {program: _bytes(source)}, limits)

    def run(
        self,
        argv: Sequence[str],
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run `argv` (an absolute path first) in /tmp, and wait for it.

        Args: files: path -> content, read-only inside. limits: instead of the sandbox's own.
        Raises EnvError if the program did not start; everything that it does itself is an Outcome.
        """
        limits = limits or self.limits
        order = self._order(argv, limits)
        if len(order) >= ORDER_MOST:
            raise EnvError(f"the program did not start: {len(order):,} B of arguments, {ORDER_MOST:,} are too many")
        began = time.monotonic()
        with ExitStack() as stack:
            given = stack.enter_context(_memory_file(_bytes(stdin)))
            out, err, report = (stack.enter_context(_memory_file()) for _ in range(3))
            inside = {INIT: self._init, **(files or {})}
            sources = {path: stack.enter_context(_memory_file(content)) for path, content in inside.items()}
            room = limits.memory + limits.tmp + OVERHEAD
            group = stack.enter_context(cgroups.Group(self._cgroups, room, limits.processes + 2))  # bwrap, init
            info, info_inside = os.pipe()
            stack.callback(os.close, info)
            command = [*self._command(sources, info_inside, limits), str(report), order]
            try:
                process = subprocess.Popen(
                    _entering(group.procs) + command,
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    pass_fds=[report, info_inside, *sources.values()],
                    env={},
                )
            finally:
                os.close(info_inside)
            timed_out = _wait(process, info, began + limits.wall_s)
            stdout, stderr, facts = (_read(fd) for fd in (out, err, report))
            return _outcome(
                json.loads(facts or "{}"), stdout, stderr, group.hits(), timed_out, time.monotonic() - began
            )

    def _command(self, sources: Mapping[str, int], info: int, limits: Limits) -> list[str]:
        """bwrap with all that it is told, up to the arguments of `init.py`; `sources`: path inside -> descriptor."""
        tmp = ["--perms", "1777", "--size", str(limits.tmp), "--tmpfs", "/tmp"]
        files = [["--perms", "0444", "--ro-bind-data", str(fd), path] for path, fd in sources.items()]
        inside = [word for file in files for word in file]
        bwrap = [self._bwrap, "--info-fd", str(info), *tmp, *inside, *self._view]
        return [*bwrap, "--", sys.executable, "-I", "-S", INIT]

    def _order(self, argv: Sequence[str], limits: Limits) -> str:
        return json.dumps({"argv": list(argv), "uid": self._uid(), "rlimits": self._rlimits(limits)})

    def _isolation(self) -> list[str]:
        """Namespaces and capabilities, and what every sandbox has of its own."""
        common = ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",  # each thread of a library has an address space to itself
            "OPENBLAS_NUM_THREADS": "1",
        }
        common += [word for pair in environment.items() for word in ("--setenv", *pair)]
        if self._uids is None:
            return ["--unshare-all", "--unshare-user", *["--disable-userns"] * (self._version >= NO_USERNS), *common]
        unshared = ("ipc", "pid", "net", "uts", "cgroup-try")
        return [
            *(f"--unshare-{name}" for name in unshared),
            *common,
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
        ]

    def _uid(self) -> int | None:
        """A uid that no other sandbox has, so that none uses up another's processes."""
        return None if self._uids is None else self._uids[0] + secrets.randbelow(self._uids[1])

    def _rlimits(self, limits: Limits) -> dict[str, tuple[int, int]]:
        wanted = {
            "AS": (limits.memory, limits.memory),
            "CPU": (limits.cpu_s, limits.cpu_s + 1),  # SIGXCPU, a second later SIGKILL
            "FSIZE": (limits.file_size, limits.file_size),
            "CORE": (0, 0),
        }
        if self._counted:
            init = self._uids is None  # it is the same user then
            processes = limits.processes + init + ("pids" in self._cgroups)  # the cgroup, which counts, refuses first
            wanted["NPROC"] = (processes, processes)
        return wanted


# ----------------------------------------------------------------------------------------------------- what is inside


def _files() -> list[str]:
    """Read-only binds: the system's programs and libraries, the interpreter's real prefix, its virtual environment."""
    words: list[str] = []
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for path in SYSTEM_FILES:
        words += ["--ro-bind-try", path, path]
    bound = [Path("/usr")]
    for prefix in _prefixes():
        if not any(prefix.is_relative_to(path) for path in bound):
            above = [str(parent) for parent in [*reversed(prefix.parents)][1:]]
            words += [word for parent in above for word in ("--perms", "0755", "--dir", parent)]  # /root may be private
            words += ["--ro-bind", str(prefix), str(prefix)]
            bound.append(prefix)
    return words


def _prefixes() -> list[Path]:
    """Where this interpreter lives, as it is called and as it is, outermost first."""
    executable = Path(os.path.realpath(sys.executable)).parent.parent
    named = {Path(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    real = {Path(os.path.realpath(path)) for path in named}
    return sorted({executable, *named, *real} - {Path("/")}, key=lambda path: len(path.parts))


def _entering(procs: Sequence[str]) -> list[str]:
    """A command that enters cgroups and becomes what follows."""
    if not procs:
        return []
    enter = "".join(f'echo 0 > "${number}" && ' for number in range(1, len(procs) + 1))
    return ["/bin/sh", "-c", f'{enter}shift {len(procs)} && exec "$@"', "sh", *procs]


def _uids() -> tuple[int, int] | None:
    """(first, count) of the uids that root may give to its sandboxes; None where its namespace has hardly any."""
    rows = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, count = max(((inside, count) for inside, _, count in rows), key=lambda row: row[1])
    if first + count >= FIRST_UID + UIDS:
        return FIRST_UID, UIDS
    return (first + count // 2, count // 2) if count > 1024 else None


def _version(path: str) -> tuple[int, ...]:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(map(int, re.findall(r"\d+", said)[:3]))


def _kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


# ---------------------------------------------------------------------------------------------------- from start to end


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


@contextmanager
def _memory_file(content: bytes = b"") -> Iterator[int]:
    """A descriptor of a file that has no name, with this content, to be read from its beginning."""
    fd = os.memfd_create("sandbox")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _read(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _wait(process: subprocess.Popen[bytes], info: int, deadline: float) -> bool:
    """Wait until the sandbox is empty; True if its time was up, so that it was killed. Nothing is left after it."""
    with ExitStack() as stack:
        stack.callback(process.wait)  # bwrap ends when process 1 has, and that when all others have
        first = _first_process(info)
        if first is not None:
            stack.callback(os.close, first)
            stack.callback(_kill, first)
        monitor = os.pidfd_open(process.pid)
        stack.callback(os.close, monitor)
        poll = select.poll()
        poll.register(monitor, select.POLLIN)
        return not poll.poll(1000 * max(0.0, deadline - time.monotonic()))


def _first_process(info: int) -> int | None:
    """A pidfd of the sandbox's process 1, which bwrap names when it is there; None if it is gone, or never was."""
    said = b""
    while b"}" not in said and (more := os.read(info, 4096)):
        said += more
    try:
        return os.pidfd_open(json.loads(said)["child-pid"])
    except (ValueError, ProcessLookupError):
        return None


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _outcome(
    facts: dict[str, Any], stdout: bytes, stderr: bytes, hits: set[str], timed_out: bool, duration_s: float
) -> Outcome:
    out, err = stdout.decode(errors="replace"), stderr.decode(errors="replace")
    if "error" in facts:
        raise EnvError(f"the program did not start: {facts['error']}")
    code = facts.get("code")
    if code is None and not timed_out and "memory" not in hits:
        raise EnvError(f"the sandbox did not start: {err.strip()[-500:]}")
    return Outcome(code, out, err, _limit(code, facts.get("left", False), err, hits, timed_out), duration_s)


def _limit(code: int | None, left: bool, stderr: str, hits: set[str], timed_out: bool) -> str | None:
    """The limit that ended a program. Rlimits show only in what the program says and does about them."""
    if code == 0:
        return "daemon" if left else None
    if "pids" in hits:
        return "processes"
    if "memory" in hits:
        return "memory"
    if timed_out:
        return "wall_s"
    by_signal = {-signal.SIGXCPU: "cpu_s", -signal.SIGXFSZ: "file_size"}
    if code in by_signal:
        return by_signal[code]
    tail = stderr[-4096:]
    said = (name for name, pattern in _SYMPTOMS.items() if re.search(pattern, tail, re.MULTILINE))
    return next(said, "daemon" if left else None)
