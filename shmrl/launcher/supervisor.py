"""Starts the roles of a run, watches them, and ends all of them: one asyncio loop in the launcher.

A role that exits is an event, and so are signals and the clock; `Supervisor.run` takes one event at a time and decides
whether the run goes on. Whatever the reason for the end, the teardown is the same: terminate, five seconds, kill, until
nothing of the run is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from shmrl.errors import ProcessFailed
from shmrl.launcher.janitor import Janitor
from shmrl.launcher.processes import child_environment, find, find_role, kill_all
from shmrl.launcher.roles import Role
from shmrl.monitor.log import tail

log = logging.getLogger(__name__)

TICK_S = 0.5
GRACE_S = 5.0
KILL_TIMEOUT_S = 5.0
CAUSE_S = 2.0
REMIND_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the launcher's exit code, the status for run.json, and why in one line.

    orderly: every final role finished by itself, so nothing may be left in the arena.
    """

    code: int
    status: str
    reason: str
    orderly: bool = False


@dataclass(frozen=True, slots=True)
class _Exited:
    role: Role
    code: int


class Supervisor:
    """The running roles. `on_tick` is called twice a second from the loop (it sweeps the arena)."""

    def __init__(self, run_id: str, janitor: Janitor, on_tick: Callable[[], object]) -> None:
        self._run_id, self._janitor, self._on_tick = run_id, janitor, on_tick
        self._events: asyncio.Queue[_Exited | signal.Signals | None] = asyncio.Queue()
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._roots: list[tuple[int, float]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._restarted: Counter[str] = Counter()
        self._interrupts = 0
        self._finished = 0.0  # when a final role last finished, or we last said who has not

    async def run(self, first: Role | None, roles: Sequence[Role]) -> Outcome:
        """`first` to its end (it makes what the others read), then all roles until the run ends, then nothing."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._signalled, number)
        self._tasks.append(asyncio.create_task(self._clock()))
        try:
            if first is not None:
                outcome = await self._watch([first])
                if outcome.code:
                    return outcome
            return await self._watch(roles)
        finally:
            await self._teardown()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ start

    async def _start(self, role: Role) -> None:
        with role.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *role.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=None if role.console else output,
                stderr=output,
                env=child_environment(self._run_id, role.name),
                start_new_session=True,
            )
        self._running[role.name] = process
        with contextlib.suppress(psutil.Error):  # it may have ended already
            root = (process.pid, psutil.Process(process.pid).create_time())
            self._roots.append(root)
            self._janitor.tell(process=root)
        self._tasks.append(asyncio.create_task(self._await_exit(role, process)))
        log.info("started %s (pid %d)", role.name, process.pid)

    async def _await_exit(self, role: Role, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._events.put_nowait(_Exited(role, code))

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(None)

    def _signalled(self, number: signal.Signals) -> None:
        self._interrupts += 1
        self._events.put_nowait(number)

    # ------------------------------------------------------------------------------------------------------ watch

    async def _watch(self, roles: Sequence[Role]) -> Outcome:
        """Start these roles and take events until the run is over. Without final roles, every role is awaited."""
        awaited = {role.name for role in roles if role.final} or {role.name for role in roles}
        self._finished = 0.0
        for role in roles:
            await self._start(role)
        while awaited:
            event = await self._events.get()
            self._remind(awaited)
            if event is None:
                outcome = self._tick()
            elif isinstance(event, _Exited):
                outcome = await self._exited(event, awaited)
            else:
                outcome = self._interrupted(event, roles)
            if outcome is not None:
                return outcome
        if self._interrupts:
            return Outcome(130, "interrupted", "stopped by Ctrl-C after draining; continue with --resume", orderly=True)
        return Outcome(0, "finished", "", orderly=True)

    def _remind(self, awaited: set[str]) -> None:
        """Say now and then who is awaited, once some have finished: a run that hangs at its end must say where."""
        now = time.monotonic()
        if self._finished and now - self._finished >= REMIND_S:
            self._finished = now
            log.warning("still waiting for %s", ", ".join(sorted(awaited)))

    def _tick(self) -> Outcome | None:
        self._on_tick()
        if self._janitor.alive():
            return None
        return Outcome(
            1, "failed", f"the janitor (pid {self._janitor.pid}) died; without it the run cannot be cleaned up"
        )

    async def _exited(self, event: _Exited, awaited: set[str]) -> Outcome | None:
        role, code = event.role, event.code
        del self._running[role.name]
        accepted = (0, 130) if self._interrupts and role.drains else (0,)
        if role.name in awaited and code in accepted:
            awaited.discard(role.name)
            self._finished = time.monotonic()
            log.info("%s finished", role.name)
            return None
        if self._interrupts and role.drains and code == -signal.SIGINT:
            return Outcome(130, "interrupted", "stopped by Ctrl-C before there was a step to finish")
        if self._restarted[role.name] < role.restarts and not self._interrupts:
            await self._restart(event)
            return None
        return await self._cause(event)

    async def _restart(self, event: _Exited) -> None:
        """Start a role again in place, once none of its processes is left, whatever session it is in: it could hold
        the role's port, or do its work beside it."""
        role = event.role
        self._restarted[role.name] += 1
        failure(role, event.code)
        log.warning("restarting %s (%d of %d)", role.name, self._restarted[role.name], role.restarts)
        await self._kill(lambda: find_role(self._run_id, role.name))
        await self._start(replace(role, command=[*role.command, *role.again], again=()))

    async def _cause(self, event: _Exited) -> Outcome:
        """The failure to report. The role that drains talks to all others and fails when one of them dies, which may be
        seen later (torch's launcher first stops its other ranks): a failure that follows shortly is the cause."""
        outcome = failure(event.role, event.code)
        if event.role.drains:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_S):
                    while True:
                        other = await self._events.get()
                        if isinstance(other, _Exited) and other.code:
                            return failure(other.role, other.code)
        return outcome

    def _interrupted(self, number: signal.Signals, roles: Sequence[Role]) -> Outcome | None:
        """The first Ctrl-C goes to the role that can drain the run; everything else ends it now."""
        if number != signal.SIGINT:
            return Outcome(128 + number, "interrupted", f"stopped by {number.name}; continue with --resume")
        drains = [self._running[role.name] for role in roles if role.drains and role.name in self._running]
        if self._interrupts == 1 and drains:
            log.info("Ctrl-C: finishing the step and writing a checkpoint; press it again to stop at once")
            for process in drains:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
            return None
        return Outcome(130, "interrupted", "stopped by Ctrl-C; continue with --resume")

    # --------------------------------------------------------------------------------------------------- teardown

    async def _teardown(self) -> None:
        """Terminate, wait up to five seconds (a further signal cuts that short), kill, wait."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline, interrupts = time.monotonic() + GRACE_S, self._interrupts
        while time.monotonic() < deadline and self._interrupts == interrupts:
            if not find(self._run_id, self._roots):
                break
            await asyncio.sleep(0.05)
        await self._kill(lambda: find(self._run_id, self._roots))

    async def _kill(self, found: Callable[[], set[psutil.Process]]) -> None:
        for survivor in await asyncio.to_thread(kill_all, found, KILL_TIMEOUT_S):
            log.error("%s survived SIGKILL", survivor)


def failure(role: Role, code: int) -> Outcome:
    """The end of a run whose role exited: logs name, code, the log's last lines and its path."""
    error = ProcessFailed(role.name, code, str(role.log), "\n".join(tail(role.log)))
    lines = "".join(f"\n  | {line}" for line in error.tail.splitlines())
    reason = f"{role.name} exited with code {code}{_how(code)}"
    log.error("%s\n  last lines of %s:%s", reason, error.log_path, lines or "\n  (empty)")
    return Outcome(1, "failed", reason)


def _how(code: int) -> str:
    if code >= 0:
        return ""
    with contextlib.suppress(ValueError):
        return f" (killed by {signal.Signals(-code).name})"
    return f" (killed by signal {-code})"
