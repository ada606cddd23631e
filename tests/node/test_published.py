"""Address files: what is live, what is stale, and that nobody reads half of one."""

import asyncio
import json
import logging
import os
import subprocess
import sys

import pytest

from shmrl.config import JobConfig
from shmrl.errors import RunError
from shmrl.node.published import Addresses, boot_id


def job(directory, node="node1", run_id="run-1"):
    return JobConfig(directory=directory, run_id=run_id, node=node, host="10.0.0.1")


@pytest.fixture
def addresses(tmp_path):
    return Addresses(job(tmp_path))


def test_what_is_published_is_read_by_every_node(tmp_path, addresses):
    made = addresses.publish("env", "train/a", "tcp://10.0.0.1:4000", origin="ab")
    other = Addresses(job(tmp_path, "node2"))
    other.publish("env", "train/a", "tcp://10.0.0.2:4001")
    other.publish("env", "eval/a", "tcp://10.0.0.2:4002")
    assert [one.address for one in other.envs("train", "a")] == ["tcp://10.0.0.1:4000", "tcp://10.0.0.2:4001"]
    assert other.envs("train", "a")[0] == made
    assert (made.pid, made.boot_id, made.node, made.origin) == (os.getpid(), boot_id(), "node1", "ab")
    assert (tmp_path / "envs" / "train" / "a.node1.address").exists()


def test_node_servers_are_found_by_the_origin_of_their_arenas(tmp_path, addresses):
    addresses.publish("node", "node", "http://10.0.0.1:1", origin="aa")
    Addresses(job(tmp_path, "node2")).publish("node", "node", "http://10.0.0.2:2", origin="bb")
    assert addresses.nodes() == {"aa": "http://10.0.0.1:1", "bb": "http://10.0.0.2:2"}
    addresses.withdraw("node", "node")
    assert addresses.nodes() == {"bb": "http://10.0.0.2:2"}
    addresses.withdraw("node", "node")


def test_a_source_is_not_taken_for_one_with_a_longer_name(addresses):
    addresses.publish("env", "train/a.b", "tcp://10.0.0.1:4000")
    assert not addresses.envs("train", "a")
    assert len(addresses.envs("train", "a.b")) == 1


def test_a_file_of_another_job_is_ignored_and_said_once(tmp_path, addresses, caplog):
    Addresses(job(tmp_path, "node2", "run-0")).publish("inference", "inference", "http://10.0.0.2:1")
    with caplog.at_level(logging.WARNING):
        assert not addresses.of("inference")
        assert not addresses.of("inference")
    (line,) = caplog.messages
    assert "inference.node2.address is ignored: it is of run run-0, and this is run-1" in line


def test_a_node_that_booted_since_and_a_process_that_is_gone_are_stale(tmp_path, addresses, caplog):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for change, why in ({"boot_id": "before"}, "started again since"), ({"pid": gone.pid}, f"{gone.pid} is gone"):
        addresses.publish("node", "node", "http://10.0.0.1:1")
        path = tmp_path / "addresses" / "node.node1.address"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert not addresses.of("node")
        assert why in caplog.text
        # of another node nothing but its run can be known, and a restarted server finds its port
        assert len(Addresses(job(tmp_path, "node2")).of("node")) == 1
        assert addresses.port("node", "node") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"role": "node"}', '{"unknown": 1}', "\x00\xff", "[" * 5000])
def test_a_file_that_cannot_be_read_is_ignored(tmp_path, addresses, text):
    path = tmp_path / "addresses" / "node.node1.address"
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    assert addresses.of("node") == []
    assert addresses.port("node", "node") == 0


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://*:1", "http://[::]:1"])
def test_a_wildcard_is_never_published(tmp_path, addresses, address):
    with pytest.raises(RunError, match="a host that others can reach it by"):
        addresses.publish("env", "train/a", address)
    assert not [*tmp_path.rglob("*.address")]


def test_who_waits_gets_them_when_they_are_all_there(tmp_path, addresses):
    other = Addresses(job(tmp_path, "node2"))

    async def later():
        waiting = asyncio.create_task(addresses.awaited(lambda: addresses.of("inference"), 2, 30, "engines"))
        addresses.publish("inference", "inference", "http://10.0.0.1:1")
        await asyncio.sleep(0)
        other.publish("inference", "inference", "http://10.0.0.2:1")
        return await waiting

    assert [one.node for one in asyncio.run(later())] == ["node1", "node2"]


def test_who_waits_in_vain_hears_which_nodes_are_there(addresses):
    addresses.publish("inference", "inference", "http://10.0.0.1:1")
    with pytest.raises(RunError, match=r"1 of 2 engines are published in .* after 0 s: on node1"):
        asyncio.run(addresses.awaited(lambda: addresses.of("inference"), 2, 0, "engines"))
