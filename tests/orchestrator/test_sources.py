"""What an episode is told of the engine, and which replicas a source can be had from."""

import logging

import pytest

from shmrl.arena import Arena
from shmrl.config import load_run
from shmrl.env.model import ModelSpec
from shmrl.errors import RunError
from shmrl.node.client import Client
from shmrl.node.server import NodeServer
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.replicas import Place, Replica
from shmrl.orchestrator.sources import Source
from tests.orchestrator import fakes
from tests.orchestrator.fakes import source as source_of
from tests.support.fake_vllm import run_on

TOKEN = "5ec2e7" * 5 + "ab"
REMOTE = "url = 'http://there:8000'\nmax_turns = 2"
SHARED = f"{REMOTE}\nargs.evaluation_sessions = 4"


def test_an_episode_asks_engines_as_the_run_is_configured(tmp_path):
    flags = {"inference__request_timeout_s": "7", "inference__logprobs_mode": "raw_logprobs"}
    flags |= {"trainer__sampling_replay": "false", "trainer__head": "4"}
    tree = run_on(tmp_path, "http://node1:8000", **flags)
    source = source_of(tree, 0, None)
    source.derive_masks = True
    spec = ModelSpec.from_wire(source.model(3, "g", "10.0.0.1"))
    assert (spec.urls, spec.timeout_s, spec.logprobs_mode) == (("http://node1:8000",), 7.0, "raw")
    assert (spec.fields, spec.head, spec.max_model_len, spec.derive_masks) == (("routing", "head"), 4, 64, True)
    assert spec.sampling["top_p"] == 0.95
    salts = {source.model(version, group, "10.0.0.1")["cache_salt"] for version in (3, 4) for group in ("g", "h")}
    assert len(salts) == 4  # no prefix is taken over from other weights
    assert not any("/" in salt for salt in salts)  # vLLM takes none


@pytest.mark.parametrize(("env", "timeout_s"), [("id = 'reverse-text'", 300), (REMOTE, 64 * 300), (SHARED, 16 * 300)])
def test_evaluations_that_take_turns_have_the_time_for_it(tmp_path, env, timeout_s):
    file = tmp_path / "run.toml"
    file.write_text(
        "[model.tiny]\n[orchestrator]\nbatch_size = 8\n"
        "[[orchestrator.train.source]]\nname = 'words'\nenv.id = 'reverse-text'\n"
        f"[[orchestrator.eval.source]]\nname = 'held'\n[orchestrator.eval.source.env]\n{env}\n"
    )
    assert source_of(load_run([file]), 1, None).timeout_s == timeout_s


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("10.0.0.1", ["http://10.0.0.1:8000", "http://10.0.0.1:8001"]),
        ("10.0.0.2", ["http://10.0.0.2:8000"]),
        ("10.0.0.3", []),  # a node without one asks them all alike
    ],
)
def test_an_engine_on_the_replicas_host_is_asked_first(tmp_path, host, near):
    source = source_of(run_on(tmp_path, "http://node1:8000"), 0, None)
    source.engines[:] = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.1:8001"]
    spec = ModelSpec.from_wire(source.model(3, "g", host))
    assert (list(spec.urls), list(spec.near)) == (source.engines, near)


def test_where_all_engines_are_on_the_host_none_is_nearer(tmp_path):
    source = source_of(run_on(tmp_path, "http://node1:8000"), 0, None)
    assert source.model(3, "g", "node1")["near"] == []


class Server:
    """What a source asks an env server of another node when it connects."""

    def __init__(self, arena, node):
        self.said = {"scores_groups": False, "demonstrates": False, "env_id": "words"}
        self.said |= {"arena": arena.address, "origin": arena.origin, "node": node}

    async def connect(self, timeout_s):
        pass

    async def info(self):
        return self.said


@pytest.fixture
def there():
    """The arena of another node, and its server."""
    with Arena.create("8MiB") as made, NodeServer(made, TOKEN) as server:
        yield made, server
        made.unlink()


def connected(tree, arena, place, said):
    return Source(tree, 0, [Replica(Server(arena, said), place)], [])


async def test_a_replica_of_another_node_is_refused_where_shared_memory_is_required(tmp_path, arena, there, caplog):
    made, server = there
    tree, place = fakes.tree(tmp_path), Place("tcp://10.0.0.2:5000", "node2", server.url)
    required = tree.model_copy(update={"arena": tree.arena.model_copy(update={"transport": "required"})})
    with Client(TOKEN, patience_s=1) as client:
        arenas = Arenas(Arena.attach(arena.address), client)
        said = rf"source 'a' .words at tcp://10.0.0.2:5000. keeps payloads in {made.address}, this run's is "
        with pytest.raises(RunError, match=rf"{said}.*'required' allows shared memory alone"):
            await connected(required, made, place, None).connect(1.0, arenas)
        with pytest.raises(RunError, match=rf"{said}.*no node server is known for it"):
            await connected(tree, made, Place(place.address, "node2"), None).connect(1.0, arenas)
        assert server.counters["requests"] == 0
        with caplog.at_level(logging.INFO, "shmrl"):
            await connected(required, arena, Place("tcp://10.0.0.1:5000"), None).connect(1.0, arenas)
            await connected(tree, made, place, None).connect(1.0, arenas)
        chosen = [record.getMessage() for record in caplog.records if "transport of" in record.getMessage()]
        assert [line.partition("): ")[2] for line in chosen] == ["shared memory", f"http from {server.url}"]
        assert list(arenas.nodes) == [made.origin]
        await arenas.close()


@pytest.mark.parametrize(("size", "position", "number"), [(1000, 6443, 443), (64, 64, 0), (1, 7, 0), (1000, 999, 999)])
async def test_a_set_that_ended_before_the_position_of_a_resumed_run_starts_over(tmp_path, size, position, number):
    tree = run_on(tmp_path, "http://node1:8000")
    client = fakes.Client(None, size=size)
    source = source_of(tree, 0, client)
    source.position = position  # of the checkpoint
    assert [(await source.next_task()).id for _ in range(2)] == [f"train{number}", f"train{(number + 1) % size}"]
