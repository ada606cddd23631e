"""The wire: msgpack with one extension type for handles, and the rules for what may travel.

Used on both ends of every ZMQ socket (env server, worker, orchestrator, trainer ranks). `pack` refuses on the sending
side whatever the other end could not read back equal, naming the path of the value, so that one bad value fails one
episode and never a server. Payload bytes do not travel here: they are in the arena.

Ranks and orchestrator exchange maps with a `kind`:

    rank -> orchestrator   hello      {rank, world, token, origin, step, phase, report, sender}
                           published  {version, path}                      rank 0, after the rename
                           report     {step, mode, metrics}                rank 0, when the step is durable
                           finished   {rank}                               after the last checkpoint
    orchestrator -> rank   warmup     {step, micro_batches, loss_tokens}   supervised, before version 0
                           begin      {version, state}                     publish this version, then expect steps
                           step       {step, run_id, micro_batches, loss_tokens, state, nodes}
                           finish     {}                                   checkpoint and exit 0

A hello says whose blocks the rank reads in place (`origin`, of its arena), how many steps the rank has completed
(`step`), where its weights are from (`phase`: new, the initial ones; saved, a checkpoint; warming, a warm-up under way;
begun, a run that has begun), and on rank 0 what it published and reported last (`report`: {path, metrics}, or None),
for an orchestrator that has not heard it, and its port for broadcast weights (`sender`, or None).

`micro_batches` are this rank's own references; `loss_tokens` is the estimate over all ranks (the trainer counts again);
`state` is the orchestrator's part of the checkpoint; `nodes`, only where some are elsewhere, says whose server has the
blocks of which arena: {Handle.origin: url}.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgpack

from shmrl.errors import ProtocolError
from shmrl.types import Handle

HANDLE_EXT = 1
MAX_MESSAGE = 256 << 20
"""Bytes. Messages are small; this bounds what a broken peer can make the other one allocate, on every socket."""
PIECE = 64 << 10
"""Bytes that are decoded in one turn of an event loop: a millisecond or two of small integers."""

_SCALARS = (str, bytes, bool, float, type(None))


def pack(value: Any) -> bytes:
    """The value as msgpack bytes; numpy scalars become plain, tuples lists. ProtocolError names what cannot travel."""
    try:
        raw: bytes = msgpack.packb(_checked(value, "$"), use_bin_type=True)
    except ProtocolError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from None
    if len(raw) > MAX_MESSAGE:
        raise ProtocolError(f"cannot be sent: {len(raw)} bytes; {MAX_MESSAGE} at most")
    return raw


def unpack(raw: bytes | memoryview) -> Any:
    """What `pack` packed. ProtocolError for anything that is not one complete msgpack value."""
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=False, ext_hook=_ext)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise _undecodable(raw, f"{type(error).__name__}: {error}") from None


async def unpack_in_turns(raw: bytes) -> Any:
    """`unpack` in pieces, between which the event loop turns: a thread would keep the interpreter from it all the same.
    Whoever decodes several messages that must keep their order awaits one before the next."""
    if len(raw) <= PIECE:
        return unpack(raw)
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, ext_hook=_ext, max_buffer_size=len(raw))
    for at in range(0, len(raw), PIECE):
        try:
            with _no_collection():
                unpacker.feed(memoryview(raw)[at : at + PIECE])
                value = unpacker.unpack()
        except msgpack.OutOfData:
            await asyncio.sleep(0)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise _undecodable(raw, f"{type(error).__name__}: {error}") from None
        else:
            if unpacker.tell() < len(raw):
                raise _undecodable(raw, f"{len(raw) - unpacker.tell()} bytes behind its end")
            return value
    raise _undecodable(raw, "it is not all there")


def _undecodable(raw: bytes | memoryview, why: str) -> ProtocolError:
    return ProtocolError(f"undecodable message of {len(raw)} bytes: {why}")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Everything that is made meanwhile stays: looking through it again and again would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ext(code: int, data: bytes) -> Handle:
    if code != HANDLE_EXT:
        raise ValueError(f"unknown extension type {code}")
    return Handle(data)


def _checked(value: Any, path: str) -> Any:
    """The value with everything msgpack packs unequally turned into what it means, or refused with its path."""
    if isinstance(value, Handle):
        return msgpack.ExtType(HANDLE_EXT, bytes(value))
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, int):
        return _integer(int(value), path)
    if isinstance(value, Mapping):
        return {_key(key, path): _checked(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_checked(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return _checked(value.item(), path)
    raise ProtocolError(f"{path}: a {type(value).__name__} cannot be sent")


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{path}: text with a lone surrogate at {error.start} cannot be sent") from None
    return value


def _integer(value: int, path: str) -> int:
    if not -(2**63) <= value < 2**64:
        raise ProtocolError(f"{path}: {value} is beyond 64 bits")
    return value


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str):
        return _text(key, path)
    if isinstance(key, int) and not isinstance(key, bool):
        return _integer(int(key), path)
    raise ProtocolError(f"{path}: a {type(key).__name__} as a key cannot be sent")
