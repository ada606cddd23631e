"""`python -m shmrl.env.sessions.template FD`: loads an environment once, and forks a process per session.

A fork has the module, the instance and its data without copying them. It is made before anything here has an arena, an
event loop or a thread: BLAS is told to have one. An environment that started threads all the same cannot be forked (a
lock that one of them holds would stay locked for ever): its sessions are started afresh, and the server's log says so.

FD is one end of a SOCK_SEQPACKET pair, messages are JSON:

    server -> template   settings, first; then "fork" with the session's end of its link as a descriptor
    template -> server   {facts, threads} or {error, message}, first; per fork {pid} with a pidfd, or {error}

This process reaps its sessions, and kills whatever an ended one leaves behind: its process group, and descendants that
left the group. When the server is gone, it ends all of them.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import setproctitle

from shmrl.env import sandbox
from shmrl.env.death import CHILD_SUBREAPER, PDEATHSIG, prctl
from shmrl.env.frames import unloadable
from shmrl.env.interface import action_model
from shmrl.env.sessions import frames, session
from shmrl.env.starting import log_of
from shmrl.errors import ConfigError
from shmrl.monitor.log import setup

log = logging.getLogger("shmrl.env.sessions.template")
MAX_MESSAGE = 128 << 10
"""Bytes: below what a socket takes at once everywhere."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def load(settings: Mapping[str, Any]) -> Any:
    """The session environment of the server's settings. ConfigError for one that only has rollouts."""
    if settings["sandbox"] is not None:
        sandbox.ensure()
    registry = import_module("shmrl.envs.registry")  # environments stand above this room: they are met by name only
    args = dict(settings["env_args"])
    prompt = args.pop("system_prompt", None)
    environment = registry.construct(settings["env_id"], args)
    if not (hasattr(environment, "reset") and hasattr(environment, "step")):
        raise ConfigError(
            f"env id {settings['env_id']!r}: serve.protocols = ['openenv'] serves sessions, and "
            f"{type(environment).__name__} has no reset and step"
        )
    if prompt is not None:
        environment.system_prompt = prompt
    return environment


def describe(environment: Any, name: str) -> dict[str, Any]:
    """What GET /metadata and GET /schema answer."""
    action = action_model(environment) or frames.TextAction
    text = action is frames.TextAction
    anything = {"type": "object", "additionalProperties": True}
    observation = frames.TextObservation.model_json_schema() if text else anything
    documentation = (type(environment).__doc__ or "").strip().partition("\n")[0]
    metadata = {
        "name": type(environment).__name__,
        "description": documentation or f"{name} environment",
        "readme_content": None,
        "version": getattr(environment, "version", None),
        "author": None,
        "documentation_url": None,
    }
    schema = {
        "action": action.model_json_schema(),
        "observation": observation,
        "state": frames.TextState.model_json_schema() if text else anything,
        "reset_observation": observation,
    }
    return {"metadata": metadata, "schema": schema}


class Forge:
    """Makes sessions on request and buries them. `_own`: children that loading the environment left, which stay."""

    def __init__(self, end: socket.socket, environment: Any, threads: int) -> None:
        self._end, self._environment, self._threads = end, environment, threads
        self._sessions: dict[int, int] = {}  # pidfd: pid
        self._own = _children()
        self._poll = select.poll()

    def run(self) -> None:
        """Serve until the server hangs up; then end every session."""
        prctl(CHILD_SUBREAPER, 1)
        self._poll.register(self._end, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._end.fileno():
                    self._bury(descriptor)
                elif not self._fork():
                    self._end_all()
                    return

    def _fork(self) -> bool:
        """One request; False at the end of the connection."""
        message, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE, 1)
        if not message:
            return False
        try:
            with socket.socket(fileno=descriptors.pop()) as end:
                pid = self._exec(end) if self._threads else self._copy(end)
        except (OSError, IndexError) as error:  # IndexError: there was no room for another descriptor
            self._end.send(json.dumps({"error": str(error)}).encode())
            return True
        pidfd = os.pidfd_open(pid)
        self._sessions[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        socket.send_fds(self._end, [json.dumps({"pid": pid}).encode()], [pidfd])
        return True

    def _copy(self, end: socket.socket) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            self._end.close()
            for pidfd in self._sessions:
                os.close(pidfd)
            session.run(end, lambda _: self._environment)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def _exec(self, end: socket.socket) -> int:
        os.set_inheritable(end.fileno(), True)
        command = [sys.executable, "-m", "shmrl.env.sessions.session", str(end.fileno())]
        return os.posix_spawn(sys.executable, command, os.environ, setpgroup=0)

    def _bury(self, pidfd: int) -> None:
        """After a session's end. Its number belongs to it until it is waited for: no stranger is killed."""
        self._poll.unregister(pidfd)
        pid = self._sessions.pop(pidfd)
        os.close(pidfd)
        _kill_group(pid)
        os.waitpid(pid, 0)
        while strays := _children() - self._own - set(self._sessions.values()):
            for stray in strays:
                os.kill(stray, signal.SIGKILL)
                os.waitpid(stray, 0)

    def _end_all(self) -> None:
        for pid in self._sessions.values():
            os.kill(pid, signal.SIGKILL)
        for pidfd in list(self._sessions):
            self._bury(pidfd)


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _threads() -> int:
    """Threads of this process beside the first."""
    return len(os.listdir("/proc/self/task")) - 1


def main(argv: list[str]) -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when its sessions stop
    end = socket.socket(fileno=int(argv[0]))
    end.set_inheritable(False)
    prctl(PDEATHSIG, signal.SIGKILL)  # while it loads, nobody reads the connection's end
    settings = json.loads(end.recv(MAX_MESSAGE) or b"null")
    if settings is None:
        return 1
    setproctitle.setproctitle(f"shmrl:env-template {settings['name']}")
    setup(f"{settings['name']}/template", log_of(settings))
    try:
        environment = load(settings)
        facts = describe(environment, settings["name"])
    except Exception as error:
        log.error("%s cannot be loaded", settings["env_id"], exc_info=not isinstance(error, ConfigError))
        message = str(error) if isinstance(error, ConfigError) else unloadable(settings["env_id"], error)
        problem = {"error": type(error).__name__, "message": message}
        end.send(json.dumps(problem).encode())
        return 1
    threads = _threads()
    end.send(json.dumps({**facts, "threads": threads}).encode())
    prctl(PDEATHSIG, 0)
    gc.collect()
    gc.freeze()  # a collection in a session would touch, and so copy, every page of the data
    Forge(end, None if threads else environment, threads).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
