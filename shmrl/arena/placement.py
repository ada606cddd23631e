"""Where an arena's pages are: huge or small, and on which NUMA node. Linux calls by ctypes, no libnuma.

Called by `Arena` in the creator (policy, first step) and in whoever commits a later step, and by `doctor`.

Huge pages: posix_fallocate sees the mount's huge= (or shmem_enabled, for memfds) but no madvise of any mapping, so a
committed step is turned into huge pages by MADV_COLLAPSE (Linux 6.1), which needs no setting of the machine and works
through a read-only mapping; the data is mapped at a multiple of 2 MiB in every process, which then map them as such.

NUMA: mbind on a shared mapping of shmem sets the policy of the file itself, so once, by the creator, before a page
exists, decides for every process that commits or touches one later.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shmrl.arena.memory import human
from shmrl.errors import ArenaError

HUGE_PAGE = 2 << 20
SYSFS = Path("/sys/devices/system/node")
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_GIVING = ("always", "within_size", "advise", "force")  # settings with which huge pages are to be had by asking
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
_MBIND = {"x86_64": 237, "aarch64": 235}
MAX_NODES = 1024  # of a Linux kernel (CONFIG_NODES_SHIFT is at most 10)
MODES = {"bind": 2, "interleave": 3}  # MPOL_BIND, MPOL_INTERLEAVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Pages:
    """What create() was asked for, and what that means here.

    huge: committed steps are made huge. required: or the arena is not made. numa: (mode, nodes) of its policy, or None.
    """

    mount: Mount
    huge: bool
    required: bool
    numa: tuple[str, list[int]] | None

    @classmethod
    def chosen(cls, huge_pages: str, numa: str, directory: Path | None) -> Pages:
        """directory: where the files are, None for memfds. ValueError for what no machine or not this one has."""
        if huge_pages not in ("auto", "always", "never"):
            raise ValueError(f"huge_pages={huge_pages!r}: 'auto', 'always' or 'never'")
        mount = mount_of(directory)
        policy = numa_policy(numa, nodes())
        if policy and mount.kind not in ("tmpfs", "memfd"):
            raise ValueError(f"numa={numa!r}: pages of {mount} have no policy, those of a tmpfs or memfd do")
        huge = huge_pages == "always" or (huge_pages == "auto" and mount.huge in _GIVING)
        return cls(mount, huge, huge_pages == "always", policy)

    def place(self, address: int, nbytes: int) -> None:
        """The NUMA policy, before a page of the mapping exists. ArenaError."""
        if self.numa:
            place(address, nbytes, *self.numa)

    def make_huge(self, address: int, nbytes: int) -> None:
        """Of the first step, committed at a mapping's start. ArenaError if that was required and did not work."""
        if self.huge and not make_huge(address, nbytes) and self.required:
            require_huge(address, nbytes, self.mount)


# -------------------------------------------------------------------------------------------------------- huge pages


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system under an arena. Example: Mount("/dev/shm", "tmpfs", huge="never")

    huge: the setting that decides; "" where there are no huge pages (a disk).
    """

    path: str
    kind: str
    huge: str

    def __str__(self) -> str:
        if self.kind == "memfd":
            return f"memfd (shmem_enabled={self.huge})"
        return f"{self.path} ({self.kind}" + (f", huge={self.huge})" if self.huge else ")")


def mount_of(directory: Path | None) -> Mount:
    """The mount that a directory is on; None: what memfds live on."""
    if directory is None:
        chosen = re.search(r"\[(\w+)\]", _read(_THP / "shmem_enabled"))
        return Mount("", "memfd", chosen[1] if chosen else "")
    best = Mount("/", "", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        if directory.resolve().is_relative_to(point) and len(point) >= len(best.path):  # a later one lies on top
            kind, _, options = source.split(" ", 2)
            huge = re.search(r"\bhuge=(\w+)", options)
            best = Mount(point, kind, (huge[1] if huge else "never") if kind == "tmpfs" else "")
    return best


def make_huge(address: int, nbytes: int) -> bool:
    """Turns committed memory into huge pages, those that it only partly covers at its front too -> whether all became.

    Data is kept, whoever writes meanwhile; a huge page that cannot be had leaves small ones.
    """
    start = address // HUGE_PAGE * HUGE_PAGE
    end = (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    return start < end and _libc.madvise(start, end - start, _MADV_COLLAPSE) == 0


def require_huge(address: int, nbytes: int, mount: Mount) -> None:
    """ArenaError unless all of `nbytes` (whole huge pages) at a mapping's start are huge, with how many are."""
    _libc.madvise(address, nbytes, _MADV_POPULATE_READ)  # only what is mapped is counted
    found = huge_bytes(address, nbytes)
    if found < max(nbytes // HUGE_PAGE, 1) * HUGE_PAGE:
        raise ArenaError(
            f"huge_pages='always': {human(found)} of {human(nbytes)} became huge pages on {mount}, Linux "
            f"{platform.release()}: Linux 6.1 gives them to memfds and tmpfs while memory is not fragmented "
            "(echo 1 > /proc/sys/vm/compact_memory), older ones to backing 'file' on a tmpfs mounted with huge=always"
        )


def huge_bytes(address: int, nbytes: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes of a mapping that this process has mapped by huge pages (ShmemPmdMapped, FilePmdMapped)."""
    total, inside = 0, False
    for line in smaps.read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < address + nbytes and address < int(span[2], 16)
        elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            total += int(line.split()[1]) << 10
    return total


# -------------------------------------------------------------------------------------------------------------- NUMA


def nodes(sysfs: Path = SYSFS, status: Path = Path("/proc/self/status")) -> list[int]:
    """NUMA nodes with memory that this process may use."""
    with_memory = numbers(_read(sysfs / "has_memory") or "0")
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", _read(status), re.MULTILINE)
    return sorted(with_memory & numbers(allowed[1]) if allowed else with_memory)


def numbers(text: str) -> set[int]:
    """ "0-2,5" -> {0, 1, 2, 5}. ValueError."""
    out: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if int(last or first) >= MAX_NODES:
            raise ValueError(f"no node {last or first}: a kernel has at most {MAX_NODES}")
        out.update(range(int(first), int(last or first) + 1))
    return out


def numa_policy(numa: str, here: list[int]) -> tuple[str, list[int]] | None:
    """What `numa` asks of a machine with the nodes `here`: (mode, nodes); None where there is nothing to choose.

    numa: "none", "interleave" (over all of them) or "bind:<nodes>", as in "bind:0-1,3". ValueError.
    """
    mode, _, wanted = numa.partition(":")
    if mode == "bind":
        try:
            chosen = numbers(wanted)
        except ValueError:
            chosen = set()
        if not chosen or chosen - set(here):
            have = ",".join(map(str, here))
            raise ValueError(f"numa={numa!r}: this process may use the nodes {have} (as in 'bind:{here[0]}')")
        return None if len(here) == 1 else (mode, sorted(chosen))
    if numa not in ("none", "interleave"):
        raise ValueError(f"numa={numa!r}: 'none', 'interleave' or 'bind:<nodes>'")
    return None if numa == "none" or len(here) == 1 else ("interleave", here)


def mbind(address: int, nbytes: int, mode: int, mask: bytes, maxnode: int, flags: int) -> int:
    """The system call -> 0 or errno. mask: little-endian words; maxnode: one more than the bits that count."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return 38  # ENOSYS
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), mode, mask, ctypes.c_ulong(maxnode), flags)
    return ctypes.get_errno() if _libc.syscall(number, *arguments) else 0


def place(
    address: int, nbytes: int, mode: str, on: list[int], call: Callable[[int, int, int, bytes, int, int], int] = mbind
) -> None:
    """Sets the policy of a mapping none of whose pages exist yet. ArenaError."""
    words = max(on) // 64 + 1
    mask = sum(1 << node for node in on).to_bytes(8 * words, "little")
    errno = call(address, nbytes, MODES[mode], mask, 64 * words + 1, 0)  # the kernel takes one bit off maxnode
    if errno:
        raise ArenaError(
            f"mbind({mode}, nodes {','.join(map(str, on))}) of {human(nbytes)}: {os.strerror(errno)} "
            "(a container needs --cap-add SYS_NICE)"
        )


def bytes_by_node(name: str, numa_maps: Path = Path("/proc/self/numa_maps")) -> dict[int, int]:
    """Bytes by NUMA node of the mapping whose file's name contains `name`, as far as its process has touched them."""
    out: dict[int, int] = {}
    for line in _read(numa_maps).splitlines():
        if name not in line:
            continue
        page = re.search(r"\bkernelpagesize_kB=(\d+)", line)
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
            out[int(node)] = out.get(int(node), 0) + int(pages) * (int(page[1]) if page else 4) * 1024
    return out


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
