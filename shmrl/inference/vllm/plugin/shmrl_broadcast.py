"""Weights by broadcast, from trainer rank 0 to engines that do not share its memory: both ends of the protocol.

`Sender` is a thread of trainer rank 0; `receive` runs in the first worker of every engine, by collective_rpc, and may
be another Python with another torch: nothing of shmrl is imported here. What travels is a published directory's
*.safetensors, byte for byte, so what loads them is what loads a directory. The process group is made for one transfer
and is never torch's default one: an engine that was restarted is a member like any other. nccl where every member is on
CUDA, else gloo.

Rank 0 serves a TCPStore; the rest is keys under the transfer's own name, in this order:

    asked, ask/<n>   the first engine's, once per transfer: {name, path, host, world}
    files            rank 0's: [[file name, bytes], ...]
    ready/<rank>     each engine's, once it has room for all of them: {device, error}
    go               rank 0's: {backend, error}; an error ends the transfer everywhere, before the first byte

Like every torch process group it trusts its network.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=120)  # until a member that does not answer is given up; every chunk starts it anew
CHUNK = 64 << 20
_LOOK = timedelta(seconds=0.2)  # how often rank 0 looks whether it is to end
HOLE_S = 10.0  # between an engine's two writes of one ask, until it counts as dead
_ASK = {"name": str, "path": str, "host": str, "world": int}
_FAULTS = (RuntimeError, OSError, ValueError)  # torch's own are RuntimeErrors


class Sender:
    """Rank 0's end: serves transfers, one at a time, until `close()`.

    device: where chunks leave from, if every engine is on CUDA as well. Attributes: port, of the store.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store = _store("127.0.0.1", 0, serves=True)
        self.port: int = self._store.port
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for number in itertools.count(1):
            if self._comes(number):
                self._transfer(number)
            elif self._closing.is_set():
                return

    def _comes(self, number: int) -> bool:
        """Wait for an ask; False at close, and for one whose engine died between its two writes."""
        counted: float | None = None
        while not self._closing.is_set():
            with contextlib.suppress(RuntimeError):  # not yet
                self._store.wait([f"ask/{number}"], _LOOK)
                return True
            if self._store.add("asked", 0) < number:
                continue
            counted = counted or time.monotonic()
            if time.monotonic() - counted > HOLE_S:
                log.warning("ask %d for weights was begun and never came: it is skipped", number)
                return False
        return False

    def _transfer(self, number: int) -> None:
        try:
            asked = json.loads(self._store.get(f"ask/{number}"))
            wanted = {key: kind(asked[key]) for key, kind in _ASK.items()}
        except (ValueError, KeyError, TypeError) as error:
            log.warning("ask %d for weights is none: %r", number, error)
            return
        try:
            self._send(PrefixStore(wanted["name"], self._store), wanted)
        except _FAULTS as error:
            log.warning("the weights in %s did not reach every engine: %s", wanted["path"], str(error))

    def _send(self, store: Any, wanted: dict[str, Any]) -> None:
        world = wanted["world"]
        try:
            with _opened(Path(wanted["path"])) as files:
                store.set("files", json.dumps([[name, mapped.numel()] for name, mapped in files]))
                ready = [json.loads(store.get(f"ready/{rank}")) for rank in range(1, world)]
                refusals = [one["error"] for one in ready if one["error"]]
                if refusals:
                    raise RuntimeError("; ".join(refusals))
                on_cuda = {self._device.type, *(one["device"] for one in ready)} == {"cuda"}
                store.set("go", json.dumps({"backend": "nccl" if on_cuda else "gloo", "error": ""}))
                with _Group(store, 0, world, wanted["host"], self._device if on_cuda else None) as group:
                    for _, mapped in files:
                        group.move(mapped)
        except _FAULTS as error:
            for key in ("files", "go"):
                store.set(key, json.dumps({"error": f"trainer rank 0: {error}"}))
            raise

    def close(self) -> None:
        """End the thread, after the transfer that it is in, and let the port go."""
        self._closing.set()
        self._thread.join()
        self._store = None


def ask(host: str, port: int, what: Any) -> Any:
    """Put a transfer into the sender's queue; a store for its further keys."""
    store = _store(host, port)
    store.set(f"ask/{store.add('asked', 1)}", json.dumps(what))
    return store


def _store(host: str, port: int, serves: bool = False) -> Any:
    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=TIMEOUT)


def receive(host: str, port: int, name: str, path: str, rank: int, world: int, device: torch.device) -> list[int]:
    """Take part in transfer `name` of directory `path`, as engine `rank` of 1 .. world - 1.

    host: rank 0's address, as every engine reaches it. Returns descriptors of the files, in anonymous shared memory;
    the caller closes them. RuntimeError or OSError if they did not arrive.
    """
    wanted = {"name": name, "path": path, "host": host, "world": world} if rank == 1 else None
    store = PrefixStore(name, ask(host, port, wanted) if wanted else _store(host, port))
    sizes = dict(_agreed(store, "files"))
    with contextlib.ExitStack() as undo:
        error, files = "", []
        try:
            for file, nbytes in sizes.items():
                files.append(os.memfd_create(f"shmrl-weights-{file}"))
                undo.callback(os.close, files[-1])
                os.posix_fallocate(files[-1], 0, nbytes)
        except OSError as full:
            error = f"{socket.gethostname()} has no room for {sum(sizes.values()):,} B of weights: {full}"
        store.set(f"ready/{rank}", json.dumps({"device": device.type, "error": error}))
        on_cuda = _agreed(store, "go")["backend"] == "nccl"
        with _Group(store, rank, world, _address_towards(host, port), device if on_cuda else None) as group:
            for file, nbytes in zip(files, sizes.values(), strict=True):
                group.move(torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8))
        undo.pop_all()
        return files


def _agreed(store: Any, key: str) -> Any:
    """What rank 0 says under `key`; RuntimeError if it says that there will be nothing, and why."""
    store.wait([key], 2 * TIMEOUT)  # rank 0 itself may wait for another engine until its timeout
    said = json.loads(store.get(key))
    if isinstance(said, dict) and said["error"]:
        raise RuntimeError(said["error"])
    return said


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`: its name may stand for loopback. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


@contextmanager
def _opened(directory: Path) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """(name, uint8 [bytes]) of every *.safetensors, mapped; they may be removed meanwhile."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{directory} has no *.safetensors")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        maps = [
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) for file in files
        ]  # torch wants to be able to write
        yield [(path.name, torch.frombuffer(m, dtype=torch.uint8)) for path, m in zip(paths, maps, strict=True)]


class _Group:
    """A process group of one transfer.

    address: this member's, for gloo. device: the CUDA device that chunks go through (nccl); None: gloo, in place.
    """

    def __init__(self, store: Any, rank: int, world: int, address: str, device: torch.device | None) -> None:
        self._root, self._group = rank == 0, dist.ProcessGroup(store, rank, world)
        self._through = None if device is None else torch.empty(CHUNK, dtype=torch.uint8, device=device)
        kind, backend = _gloo(store, rank, world, address) if device is None else _nccl(store, rank, world)
        self._group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        self._group._register_backend(device or torch.device("cpu"), kind, backend)

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self._group.shutdown()

    def move(self, data: torch.Tensor) -> None:
        """Rank 0's `data` into everybody's: uint8 [n] in host memory, of the same n."""
        for chunk in torch.split(data, CHUNK):
            through = chunk if self._through is None else self._through[: len(chunk)]
            if self._root and self._through is not None:
                through.copy_(chunk)
            self._group.broadcast(through, 0).wait()
            if not self._root and self._through is not None:
                chunk.copy_(through)


def _gloo(store: Any, rank: int, world: int, address: str) -> tuple[Any, Any]:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], TIMEOUT
    return dist.ProcessGroup.BackendType.GLOO, gloo(store, rank, world, options)


def _nccl(store: Any, rank: int, world: int) -> tuple[Any, Any]:
    # Read when a group is made: a member that dies is an exception in `wait`, and not the end of this process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroup.BackendType.NCCL, nccl(store, rank, world, options)
