"""Names, descriptors and lives of an arena's three files: `live`, `ctl`, `data`.

Called by create, attach, unlink and the inspectors, in every process. An address says where they are:
    shm:<id>      /dev/shm/shmrl-<uid>-<id>.{live,ctl,data}, by posix_ipc
    file:<path>   <path>.{live,ctl,data}
    memfd:<id>    no names: `memfd:shmrl-<id>-<part>` among the descriptors of this uid's processes, through /proc
`live` is created first and its byte locked before `ctl` gets a magic: what has neither is garbage for anyone to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import posix_ipc

from shmrl.arena import spill
from shmrl.arena._ctl import crc32c, spill_dir_of
from shmrl.errors import ForeignArena

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
PARTS = ("live", "ctl", "data")
SHM = Path("/dev/shm")
LOGS = "/logs/attempt_"  # below the directory of a run: config.rundir


@dataclass(frozen=True, slots=True)
class Files:
    """Where an arena's parts are, without any of them open."""

    backing: str
    key: str  # id, or path for `file`

    @property
    def address(self) -> str:
        return f"{self.backing}:{self.key}"

    @property
    def directory(self) -> Path:
        """What bounds its size and makes its node: the mount under the data file (none under a memfd)."""
        return {"file": Path(self.key).parent, "shm": SHM}.get(self.backing, Path("/"))

    @property
    def mount(self) -> Path | None:
        """The directory whose file system bounds it; None under a memfd."""
        return None if self.backing == "memfd" else self.directory

    def name(self, part: str) -> str:
        """posix_ipc name, file path, or memfd name of a part."""
        if self.backing == "file":
            return f"{self.key}.{part}"
        return f"/shmrl-{os.geteuid()}-{self.key}.{part}" if self.backing == "shm" else f"shmrl-{self.key}-{part}"

    def create(self, part: str) -> int:
        """A new, empty part of mode 0600 -> descriptor, read-write. FileExistsError."""
        if self.backing == "memfd":
            return _reopen(os.memfd_create(self.name(part), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), os.O_RDWR)
        fd = self._open_named(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.fchmod(fd, 0o600)  # the umask applied
        return fd

    def size(self, fd: int, nbytes: int) -> None:
        """Gives a new part its final size; a memfd can then be resized by nobody (a truncate is a SIGBUS for all)."""
        os.ftruncate(fd, nbytes)
        if self.backing == "memfd":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def open(self, part: str, *, write: bool) -> int:
        """A description of its own of an existing part. FileNotFoundError, PermissionError."""
        flags = os.O_RDWR if write else os.O_RDONLY
        if self.backing == "memfd":
            return _open_memfd(self.name(part), flags | os.O_CLOEXEC)
        return self._open_named(part, flags)

    def _open_named(self, part: str, flags: int) -> int:
        if self.backing == "file":
            return os.open(self.name(part), flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)  # a pipe would wait
        try:
            ipc = flags & (os.O_CREAT | os.O_EXCL)
            segment = posix_ipc.SharedMemory(self.name(part), ipc, 0o600, read_only=flags & 3 == os.O_RDONLY)
        except posix_ipc.ExistentialError as error:
            kind = FileExistsError if ipc else FileNotFoundError
            raise kind(f"{self.address} ({part}): {error}") from None
        return int(segment.fd)

    def exists(self) -> bool:
        """Whether any part is there."""
        for part in PARTS:
            with contextlib.suppress(FileNotFoundError, ForeignArena):
                os.close(self.open(part, write=False))
                return True
        return False

    def unlink(self) -> None:
        """Removes the spill directory and the names that exist; `live` last, so that a gc finds what is half done."""
        named = Path(self.spill_dir() or "/")
        if named.name == f"shmrl-{os.geteuid()}-{self.key[-32:]}":
            spill.remove(named)
        for part in reversed(PARTS):
            try:
                if self.backing == "shm":
                    posix_ipc.unlink_shared_memory(self.name(part))
                elif self.backing == "file":
                    os.unlink(self.name(part))
            except (posix_ipc.ExistentialError, FileNotFoundError):
                continue

    def spill_dir(self) -> str:
        """This arena's directory of spilled blocks, from its header; "" if there is none to be seen."""
        try:
            fd = self.open("ctl", write=False)
        except (FileNotFoundError, PermissionError, ForeignArena):
            return ""
        try:
            return spill_dir_of(os.pread(fd, 4096, 0))
        finally:
            os.close(fd)

    def is_stopped(self, pid: int) -> bool:
        """Whether the process of this pid that has us open is stopped (SIGSTOP, a debugger); False if it is not seen,
        as one of another pid namespace is not."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state in "Tt" and any(self.name("live") in one for one in _open_in(pid))
        except OSError:
            return False

    def directory_of(self, pid: int) -> str | None:
        """Where the process of this pid that has us open belongs: the run's directory, from the log that it writes,
        else its working directory; None if it is not seen."""
        try:
            opened = _open_in(pid)
            if not any(self.name("live") in one for one in opened):
                return None
            found = (one.partition(LOGS) for one in opened)
            return next((directory for directory, logs, _ in found if logs), None) or os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            return None

    def is_unlinked(self, live_fd: int) -> bool:
        """Whether somebody removed `live` between our open and our lock (a memfd has no name to lose)."""
        return self.backing != "memfd" and os.fstat(live_fd).st_nlink == 0


def _open_in(pid: int) -> list[str]:
    """What a process has open, as far as it is seen from here."""
    found = []
    for fd in glob.iglob(f"/proc/{pid}/fd/*"):
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(fd))
    return found


def new(backing: str, base: str | None) -> Files:
    """A fresh, 128-bit random name. ValueError for a backing or base that does not exist."""
    ident = secrets.token_hex(16)
    if backing == "file":
        if base is None or not os.path.isdir(base):
            raise ValueError(f"backing='file' needs base=, an existing directory, got {base!r}")
        return Files("file", str(Path(base).resolve() / f"shmrl-{os.geteuid()}-{ident}"))
    if backing not in ("shm", "memfd") or base is not None:
        raise ValueError(f"backing={backing!r}, base={base!r}: 'shm', 'memfd', or 'file' with base=")
    return Files(backing, ident)


def claimed(backing: str, base: str | None) -> tuple[Files, int]:
    """A new arena's name, and its `live` with byte 0 locked: alive before a gc could take anything for garbage."""
    while True:
        where = new(backing, base)
        live = where.create("live")
        if lock_byte(live, 0) and not where.is_unlinked(live):
            return where, live
        os.close(live)  # a gc came between


def parse(address: str) -> Files:
    """The files behind an address. ValueError."""
    backing, _, key = address.partition(":") if isinstance(address, str) else ("", "", "")
    if backing not in ("shm", "memfd", "file") or not key or (backing != "file" and not key.isalnum()):
        raise ValueError(f"not an arena address: {address!r} (expected shm:<id>, memfd:<id> or file:<path>)")
    return Files(backing, key)


def listed(base: str | None = None) -> list[Files]:
    """Every named arena of this uid in /dev/shm and in the directory `base`, whole or not."""
    prefix = f"shmrl-{os.geteuid()}-"
    out = [Files("shm", stem[len(prefix) :]) for stem in _stems(SHM, prefix)]
    return out if base is None else out + listed_in(base)


def _stems(directory: str | Path, prefix: str) -> list[str]:
    if not os.path.isdir(directory):
        return []
    names = (name.rsplit(".", 1) for name in os.listdir(directory) if name.startswith(prefix))
    return sorted({stem for stem, *part in names if part and part[0] in PARTS})


def listed_in(directory: str) -> list[Files]:
    """Every arena of this uid that was made with backing="file" in a directory, whole or not."""
    return [Files("file", str(Path(directory, stem).resolve())) for stem in _stems(directory, f"shmrl-{os.geteuid()}-")]


def listed_open() -> list[Files]:
    """Arenas in memfds and files elsewhere that a process of this uid has open, through /proc."""
    memfd, file = r"/memfd:shmrl-([0-9a-f]{32})-live.*", rf"(/(?!dev/shm/).*/shmrl-{os.geteuid()}-[0-9a-f]{{32}})\.live"
    live, found = re.compile(f"{memfd}|{file}"), set()
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # gone meanwhile, or another uid's
            if match := live.fullmatch(os.readlink(path)):
                found.add(Files("memfd", match[1]) if match[1] else Files("file", match[2]))
    return sorted(found, key=lambda files: files.address)


def remove_if_dead(files: Files) -> bool:
    """Unlinks an arena nobody is attached to -> whether it was. The lock over all slots is held while it unlinks."""
    try:
        fd = files.open("live", write=True)
    except FileNotFoundError:
        files.unlink()  # a creator makes `live` first: leftovers of an unlink that was interrupted
        return True
    try:
        if not lock_byte(fd, 0, 256):
            return False
        files.unlink()
        return True
    finally:
        os.close(fd)


def lock_byte(fd: int, byte: int, nbytes: int = 1) -> bool:
    """Takes OFD locks on bytes of a `live` file -> False if another description has one of them. OSError."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, nbytes, 0))
    except BlockingIOError:
        return False
    return True


def byte_taken(fd: int, byte: int, nbytes: int = 1) -> bool:
    """Whether another open description locks one of these bytes. OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, nbytes, 0)
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)


def node_of(directory: Path) -> tuple[int, int]:
    """(node, boot): 32-bit hashes of boot id, hostname and device of the directory; of the boot id alone."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    device = os.stat(directory).st_dev
    return crc32c(boot + os.uname().nodename.encode() + device.to_bytes(8, "little")), crc32c(boot)


def _reopen(fd: int, flags: int) -> int:
    """A description of our own: an inherited one would share its locks."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    finally:
        os.close(fd)


def _open_memfd(name: str, flags: int) -> int:
    """Opens a memfd that some process of this uid has open, through its /proc entry. ForeignArena when none can be."""
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # that process ended meanwhile, or is another uid's: the next one may do
            if os.readlink(path).startswith(f"/memfd:{name}"):
                return os.open(path, flags)
    raise ForeignArena(f"no process of uid {os.geteuid()} in this pid namespace has {name} open")
