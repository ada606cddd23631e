"""The rank's link: hello first, hello again to an orchestrator that came back, an end to waiting."""

import threading

import pytest
import zmq

from shmrl import wire
from shmrl.errors import RunError
from shmrl.trainer.link import OrchestratorLink


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/trainer.sock"


def bind(address):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.bind(address)
    return context, socket


def unbind(context, socket):
    socket.close()
    context.term()


def test_hello_comes_first_and_again_after_a_restart(address):
    steps = iter([4, 5])
    link = OrchestratorLink(address, lambda: {"kind": "hello", "step": next(steps)}, patience_s=30)
    received = []
    reader = threading.Thread(target=lambda: received.append(link.receive()))
    reader.start()
    context, socket = bind(address)
    try:
        identity, raw = socket.recv_multipart()
        assert wire.unpack(raw) == {"kind": "hello", "step": 4}
        unbind(context, socket)
        context, socket = bind(address)
        again, raw = socket.recv_multipart()
        assert wire.unpack(raw) == {"kind": "hello", "step": 5}
        assert again != identity
        socket.send_multipart([again, wire.pack({"kind": "finish"})])
        reader.join(timeout=20)
        assert received == [{"kind": "finish"}]
    finally:
        link.close()
        unbind(context, socket)


def test_an_orchestrator_that_stays_away_ends_the_wait(address):
    link = OrchestratorLink(address, lambda: {"kind": "hello"}, patience_s=0.5)
    try:
        with pytest.raises(RunError, match=r"no orchestrator at ipc://.* for 0\.5 s"):
            link.receive()
    finally:
        link.close()


def test_a_supervised_rank_is_less_patient(address, monkeypatch):
    monkeypatch.setenv("SHMRL_RUN", "test")
    monkeypatch.setattr("shmrl.trainer.link.SUPERVISED_PATIENCE_S", 0.5)
    link = OrchestratorLink(address, lambda: {"kind": "hello"}, patience_s=600)
    context, socket = bind(address)
    failed = []

    def read():
        try:
            link.receive()
        except RunError as error:
            failed.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    socket.recv_multipart()
    unbind(context, socket)
    reader.join(timeout=20)
    assert failed == [f"no orchestrator at {address} for 0.5 s"]
    link.close()


def test_a_supervised_rank_waits_for_an_orchestrator_that_is_started_again(address, monkeypatch):
    monkeypatch.setenv("SHMRL_RUN", "test")
    monkeypatch.setattr("shmrl.trainer.link.SUPERVISED_PATIENCE_S", 0.0)
    link = OrchestratorLink(address, lambda: {"kind": "hello"}, patience_s=30, returning=True)
    received = []
    reader = threading.Thread(target=lambda: received.append(link.receive()))
    context, socket = bind(address)
    reader.start()
    socket.recv_multipart()
    unbind(context, socket)
    reader.join(timeout=1.5)  # more than a look at the clock
    assert reader.is_alive()
    context, socket = bind(address)
    identity, _ = socket.recv_multipart()
    socket.send_multipart([identity, wire.pack({"kind": "finish"})])
    reader.join(timeout=20)
    assert received == [{"kind": "finish"}]
    link.close()
    unbind(context, socket)


def test_a_message_that_is_too_long_ends_the_connection_and_the_rank_says_hello_again(address, monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1000)
    link, received = OrchestratorLink(address, lambda: {"kind": "hello"}, patience_s=30), []
    reader = threading.Thread(target=lambda: received.append(link.receive()))
    reader.start()
    context, socket = bind(address)
    try:
        identity, _ = socket.recv_multipart()
        socket.send_multipart([identity, bytes(2000)])
        again, raw = socket.recv_multipart()
        assert wire.unpack(raw) == {"kind": "hello"}
        socket.send_multipart([again, wire.pack({"kind": "finish"})])
        reader.join(timeout=20)
        assert received == [{"kind": "finish"}]
    finally:
        link.close()
        unbind(context, socket)
