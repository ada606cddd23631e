"""The native protocol of an env server, as both ends see it: frames, errors, episodes on the wire.

ZMQ, client -> server [request id, method, msgpack map], server -> client [request id, msgpack map]; before a reply any
number of [request id, "delta", msgpack map], where they were asked for (deltas: true). The first message of a
connection is `hello {token}`. Every request gets exactly one reply, a cancelled one too. A reply has `success`, and
`error {type, message, chain, where}` where it failed. Never an array: samples travel as references
(`payload.wireform`). An empty frame from the server means nothing (it asks who is still there).
Both ends send ZMQ's heartbeats: a peer that is silent for SILENCE_MS is gone, and until then nothing is lost.

    health {wait}             facts of the pool (see server.py); wait=True: once a worker is ready
    info {}                   name, env_id, split, arena, node, fields, demonstrates, scores_groups,
                              max_concurrent, workers
    tasks {split, start, n}   tasks: [[id, data, seed], ...], fewer than n only at the end of the set; n <= 1024
    run_rollout {task, model, group_id, seed, keep, tag, shares}    one episode; keep = train | eval | warmup; shares:
                              its tag's group stores its prompt once, and the client keeps that until the last reply
    run_group {task, model, group_id, seeds, keep, tag}     one episode per seed, scored together; tags are tag/0, ...
    evaluate {split, start, n, rollouts, concurrency, model, seed, tag}    n tasks, `rollouts` episodes of each, at
                              most `concurrency` at a time, keep = eval; a delta {task, rollout, reply} tells each that
                              ended, the reply how many: tasks, rollouts
    cancel {request_id, tag}  cancelled: whether it was still running; blocks of an unclaimed reply are freed
    take_over {run}           ended: how many episodes of the run that other clients had asked for were still open; from
                              the reply on, nothing of them is written or freed

A delta of run_rollout and run_group is {phase, episode, turns, tokens}, and in an evaluation `messages`: those since
the delta before. phase: model | environment | scoring | storing; episode: which one of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from shmrl import errors
from shmrl.errors import EnvError, ProtocolError
from shmrl.payload.wireform import sample_from_wire, sample_to_wire
from shmrl.types import Delta, EpisodeResult, ErrorInfo, Task
from shmrl.wire import pack, unpack_in_turns

METHODS = ("hello", "health", "info", "tasks", "run_rollout", "run_group", "evaluate", "cancel", "take_over")
MAX_TASKS = 1024
MAX_HELLO = 4096
"""Bytes of the payload of a hello: nothing longer is decoded of somebody who has not shown the token."""
PING_MS, SILENCE_MS = 5_000, 60_000
"""How often each end asks whether the other is there, and after what silence the connection ends."""
KEEPS = ("train", "eval", "warmup")
FIELDS = ("routing", "head", "mask")
_EPISODE = (
    "task_id", "reward", "rewards", "metrics", "stop_reason", "num_turns", "num_tokens", "version_start", "version_end",
)  # fmt: skip


def notice_silence(socket: zmq.Socket[Any]) -> None:
    """Before bind or connect: a peer that is frozen, or behind a cut cable, ends the connection, as a dead one does.
    Threads of ZMQ ask and answer, so that a busy interpreter is no silence."""
    socket.set(zmq.HEARTBEAT_IVL, PING_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def method_of(frames: Sequence[bytes]) -> str:
    """The method of a client's frames; ProtocolError says what is not the protocol."""
    if len(frames) != 3:
        raise ProtocolError(f"{len(frames)} frames; a request is [request id, method, payload]")
    method = frames[1].decode("utf-8", "replace")
    if method not in METHODS:
        raise ProtocolError(f"unknown method {method[:64]!r}; there are {', '.join(METHODS)}")
    return method


async def payload_of(method: str, frames: Sequence[bytes]) -> dict[str, Any]:
    """The map of a request. ProtocolError for what is none."""
    payload = await unpack_in_turns(frames[2])
    if not isinstance(payload, dict) or not all(isinstance(key, str) for key in payload):
        raise ProtocolError(f"{method}: the payload is a {type(payload).__name__}, not a map with text keys")
    return payload


def expect(payload: Mapping[str, Any], method: str, **types: type | tuple[type, ...]) -> None:
    """ProtocolError for keys of a request that are missing or of another type."""
    for key, kind in types.items():
        if key not in payload:
            raise ProtocolError(f"{method}: {key} is missing")
        if not isinstance(payload[key], kind):
            raise ProtocolError(f"{method}: {key} is a {type(payload[key]).__name__}: {payload[key]!r}"[:300])


def check_tag(tag: Any, method: str) -> str:
    """The tag; ProtocolError unless it names a group or an episode: whatever fails under a tag is discarded by it."""
    parts = tag.split("/") if isinstance(tag, str) else []
    if len(parts) < 3 or not all(parts):
        raise ProtocolError(f"{method}: tag {tag!r} is not run/source/group or run/source/group/episode"[:300])
    return str(tag)


def shares(method: str, payload: Mapping[str, Any]) -> bool:
    """Whether an episode refers to what others of its group have stored; ProtocolError for a tag without a group."""
    if method != "run_rollout" or payload.get("keep") != "train" or not payload.get("shares"):
        return False
    tag = check_tag(payload["tag"], method)
    if tag.count("/") != 3:
        raise ProtocolError(f"{method}: tag {tag!r} is not run/source/group/episode, which shares need"[:300])
    return True


def episodes_tag(method: str, payload: dict[str, Any]) -> str:
    """Under which tag a request's blocks are; "" for requests that have none."""
    if method not in ("run_rollout", "run_group", "evaluate"):
        return ""
    expect(payload, method, tag=str)
    return check_tag(payload["tag"], method)


def run_of(tag: str) -> str:
    """Example: "orc/words/a3f1-17/3" -> "orc/" """
    return tag.partition("/")[0] + "/"


def error_reply(error: BaseException | ErrorInfo) -> bytes:
    """The reply of a request that failed."""
    info = error if isinstance(error, ErrorInfo) else ErrorInfo.of(error)
    return pack({"success": False, "error": _info_to_wire(info)})


def raise_error(reply: Mapping[str, Any]) -> None:
    """Raise a failed reply's error as its own type where it is one of ours, else as EnvError."""
    info = _info_from_wire(reply.get("error"))
    kind = getattr(errors, info.type, None)
    ours = isinstance(kind, type) and issubclass(kind, (EnvError, errors.ConfigError))
    raise (kind if ours else EnvError)(info.message)  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- tasks, episodes


def task_to_wire(task: Task) -> list[Any]:
    """Example: ["train-17", {"text": "olleh"}, 17]"""
    return [task.id, task.data, task.seed]


def task_from_wire(raw: Any) -> Task:
    """The task of a list or of a map {id, data, seed}; ProtocolError otherwise."""
    values = [raw.get(key) for key in ("id", "data", "seed")] if isinstance(raw, Mapping) else raw
    if not isinstance(values, list) or [type(value) for value in values] != [str, dict, int]:
        raise ProtocolError(f"task: expected an id, a map and a seed: {raw!r}"[:300])
    return Task(*values)


def episode_to_wire(result: EpisodeResult) -> dict[str, Any]:
    """The reply of one episode; its size does not depend on the number of tokens."""
    if not result.success:
        assert result.error is not None
        return {"success": False, "error": _info_to_wire(result.error), "episode": {"task_id": result.task_id}}
    episode = {key: value for key in _EPISODE if (value := getattr(result, key)) or key == "reward"}
    reply: dict[str, Any] = {"success": True, "episode": episode}
    if result.samples:
        node = result.samples[0].segments[0][0].node
        branches = [sample_to_wire(sample) for sample in result.samples]
        reply["info"] = {"shmrl_payload": {"node": node, "branches": branches}}
    if result.messages is not None:
        reply["messages"] = list(result.messages)
    return reply


def episode_from_wire(reply: Mapping[str, Any], wire_bytes: int) -> EpisodeResult:
    """The result in a reply; a failed one is a result too, with `error`."""
    episode = {key: value for key, value in reply.get("episode", {}).items() if key in _EPISODE}
    episode.setdefault("task_id", "")
    if not reply.get("success"):
        return EpisodeResult(
            False, episode["task_id"], error=_info_from_wire(reply.get("error")), wire_bytes=wire_bytes
        )
    branches = reply.get("info", {}).get("shmrl_payload", {}).get("branches", [])
    messages = reply.get("messages")
    return EpisodeResult(
        success=True,
        samples=tuple(sample_from_wire(branch) for branch in branches),
        messages=None if messages is None else tuple(messages),
        wire_bytes=wire_bytes,
        **episode,
    )


def delta_from_wire(raw: Mapping[str, Any]) -> Delta:
    """How an episode gets on, as its worker's `Progress` told it."""
    told = {key: raw[key] for key in ("phase", "episode", "turns", "tokens")}
    return Delta(**told, messages=tuple(raw.get("messages", ())))


def _info_to_wire(info: ErrorInfo) -> dict[str, Any]:
    """Messages come from anywhere: what cannot be encoded is replaced, so that an error can always be told."""
    texts = [text.encode("utf-8", "replace").decode() for text in (info.type, info.message, *info.chain)]
    where = {"where": info.where.encode("utf-8", "replace").decode()} if info.where else {}
    return {"type": texts[0], "message": texts[1], "chain": texts[2:], **where}


def _info_from_wire(raw: Any) -> ErrorInfo:
    if not isinstance(raw, Mapping):
        return ErrorInfo("ProtocolError", f"a failed reply without an error: {raw!r}")
    chain = tuple(map(str, raw.get("chain") or ()))
    return ErrorInfo(str(raw.get("type")), str(raw.get("message")), chain, str(raw.get("where") or ""))
