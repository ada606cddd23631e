"""`shmrl run` with its arena elsewhere than in /dev/shm: every role finds it by its address, and nothing is left."""

import asyncio

import pytest

from shmrl.arena.placement import mount_of
from tests.arena.conftest import UNSHARE
from tests.support.fake_engine import FakeEngine, Oracle
from tests.support.runs import RUN, with_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def mounted(options, directory):
    """A mount namespace of its own, with a tmpfs there."""
    return [*UNSHARE, "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {directory} && exec "$@"', "sh"]


async def arena_of(run, **options):
    """The arena's address in a run of two steps; its engine, which has no part in the arena, is one of this process."""
    async with FakeEngine(Oracle(layers=2, experts=4)) as engine:
        one = run(text=with_model(RUN, engine), **options, **{"run.max-steps": 2}).start()
        code, output = await asyncio.to_thread(one.finish, 250)
    assert code == 0, output
    one.assert_nothing_left()
    assert [line["step"] for line in one.metrics()][-1] == 2
    return one.record()["addresses"]["arena"]


async def test_memfds_where_dev_shm_cannot_be_written_to(run):
    address = await arena_of(run, within=mounted("ro", "/dev/shm"), **{"arena.backing": "memfd"})
    assert address.startswith("memfd:")


async def test_files_on_a_tmpfs_of_huge_pages(run, tmp_path):
    base = tmp_path / "huge"
    base.mkdir()
    arena = {"arena.backing": "file", "arena.base": base, "arena.huge-pages": "always"}
    if mount_of(None).huge == "deny":
        pytest.skip("huge pages of shared memory are denied on this machine")
    address = await arena_of(run, within=mounted("size=256m,huge=always", base), **arena)
    assert address.startswith(f"file:{base}/shmrl-")
    assert list(base.iterdir()) == []
