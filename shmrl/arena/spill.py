"""The directory of an arena's spilled blocks, `<spill_dir>/shmrl-<uid>-<arena id>/`: made, opened, removed.

Called by create, attach and whoever removes an arena's names; the files in it are csrc/arena_spill.c's. Every attached
process has it open under a shared flock (a forked child closes it), so one that can be locked exclusively is needed by
nobody: that is how a directory is known to be garbage when the arena that named it is gone (memfd, a lost /dev/shm).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LONGEST = 511  # bytes of a path in the arena's header
_BLOCK_FILE = re.compile(r"\d+-\d+")


def path_of(spill_dir: str | os.PathLike[str], ident: str) -> Path:
    """The directory of one arena under the user's. ValueError: not an existing directory, or too long a path."""
    parent = Path(spill_dir).resolve()
    if not os.fspath(spill_dir) or not os.path.isdir(parent):
        raise ValueError(f"spill_dir={str(spill_dir)!r} is not an existing directory")
    path = parent / f"shmrl-{os.geteuid()}-{ident}"
    if len(os.fsencode(path)) > LONGEST:
        raise ValueError(f"spill_dir={str(spill_dir)!r}: the arena's directory there has more than {LONGEST} bytes")
    return path


def made(path: Path) -> int:
    """A new directory that only we may enter -> descriptor with its flock. OSError."""
    while True:
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # a sweep came between
            return opened(path)


def opened(path: Path) -> int:
    """A description of our own with the flock. FileNotFoundError: gone, or being removed; PermissionError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP):
            raise
        raise FileNotFoundError(f"no spill directory {str(path)!r}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink == 0:
            raise BlockingIOError
    except BlockingIOError:
        os.close(fd)
        raise FileNotFoundError(f"{path} was removed meanwhile") from None
    return fd


def remove(path: Path) -> None:
    """Removes the blocks' files and the directory, whoever has it open; what is not ours stays. Idempotent."""
    for _ in range(3):  # a living arena may spill meanwhile
        try:
            for name in filter(_BLOCK_FILE.fullmatch, os.listdir(path)):
                with suppress(FileNotFoundError):
                    os.unlink(path / name)
            os.rmdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            problem = error
        else:
            return
    log.warning("the spill directory %s stays: %s", path, problem.strerror)


def faults(path: Path, rows: Callable[[], Iterable[dict[str, Any]]]) -> list[str]:
    """A line per spilled block whose file is gone, shorter than the block or no file. rows: Arena.ls() as it is now.

    A block that was freed since it was looked at has no file and is no fault: only what is still there is told.
    """
    missing = {(row["slot"], row["generation"]): row for row in rows() if _is_cut(path, row)}
    if not missing:
        return []
    still = (row for row in rows() if (row["slot"], row["generation"]) in missing)
    return [
        f"block {row['slot']} generation {row['generation']}: its file of {row['nbytes']} bytes "
        f"in {path} is gone, cut or replaced"
        for row in still
        if row["state"] == "ready"
    ]


def _is_cut(path: Path, row: dict[str, Any]) -> bool:
    if "spilled" not in row["flags"] or row["state"] != "ready":
        return False
    try:
        found = os.lstat(path / f"{row['slot']}-{row['generation']}")
    except OSError:
        return True
    return not stat.S_ISREG(found.st_mode) or found.st_size < int(row["nbytes"])


def sweep(spill_dir: Path) -> None:
    """Removes every directory of this uid's arenas under `spill_dir` that no process has open."""
    for path in spill_dir.glob(f"shmrl-{os.geteuid()}-*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
            finally:
                os.close(fd)
