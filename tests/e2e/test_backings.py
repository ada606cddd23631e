"""`shmrl run` with its arena elsewhere than in /dev/shm: every role finds it by its address, and nothing is left."""

import pytest

from shmrl.arena.placement import mount_of
from tests.arena.conftest import UNSHARE
from tests.support.runs import TINY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FLAGS = {"run.max-steps": 2}


def mounted(options, directory):
    """A mount namespace of its own, with a tmpfs there."""
    return [*UNSHARE, "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {directory} && exec "$@"', "sh"]


def finished(one):
    code, output = one.start().finish(250)
    assert code == 0, output
    one.assert_nothing_left()
    assert [line["step"] for line in one.metrics()][-1] == 2
    return one.record()["addresses"]["arena"]


def test_memfds_where_dev_shm_cannot_be_written_to(run):
    address = finished(run(text=TINY, within=mounted("ro", "/dev/shm"), **{"arena.backing": "memfd", **FLAGS}))
    assert address.startswith("memfd:")


def test_files_on_a_tmpfs_of_huge_pages(run, tmp_path):
    base = tmp_path / "huge"
    base.mkdir()
    arena = {"arena.backing": "file", "arena.base": base, "arena.huge-pages": "always"}
    if mount_of(None).huge == "deny":
        pytest.skip("huge pages of shared memory are denied on this machine")
    address = finished(run(text=TINY, within=mounted("size=256m,huge=always", base), **arena, **FLAGS))
    assert address.startswith(f"file:{base}/shmrl-")
    assert list(base.iterdir()) == []
