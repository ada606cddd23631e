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
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import psutil

from shmrl.errors import ProcessFailed, RunError, ShmrlError, told
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
TRAINER = "trainer"
_LATER = "what comes later"
RESTING_S = (2.0, 600.0)  # least and most, before a role that serves on demand can be started again


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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Somebody has connected to the role's socket."""

    role: Role


@dataclass(frozen=True, slots=True)
class Rules:
    """What is different on a node of a run over several.

    Attributes:
        spare: whether the others go on when this role has died for good; when no other spare one is left, all end.
        told: the run ends when `on_tick` says so, not when roles finish.
        ending: is told the outcome before anything is ended; flush_s: how long the trainer then may go on while
            `flushing(role that failed)`, so that a checkpoint is whole.
    """

    spare: Callable[[Role], bool] = lambda _: False
    told: bool = False
    ending: Callable[[Outcome], object] = lambda _: None
    flush_s: float = 0.0
    flushing: Callable[[str], bool] = lambda _: False


_Event = _Exited | _Wanted | signal.Signals | Sequence[Role] | ShmrlError | None


class Supervisor:
    """The running roles. `on_tick` is called twice a second from the loop: it sweeps the arena, and may end the run."""

    def __init__(
        self, run_id: str, janitor: Janitor, on_tick: Callable[[], Outcome | None], rules: Rules | None = None
    ) -> None:
        self._run_id, self._janitor, self._on_tick, self._rules = run_id, janitor, on_tick, rules or Rules()
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._started: dict[str, Role] = {}
        self._culprit = ""  # the role that ended the run
        self._roots: list[tuple[int, float]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._restarted: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()  # of roles on demand, in a row
        self._interrupts = 0
        self._asked = "Ctrl-C"  # what the run drains by
        self._finished = 0.0  # when a final role last finished, or we last said who has not

    def drain(self, asked: str) -> None:
        """As the first Ctrl-C; once. asked: by what, for people."""
        if not self._interrupts:
            self._asked = asked
            self._signalled(signal.SIGINT)

    async def run(
        self,
        first: Role | None,
        roles: Sequence[Role],
        later: Callable[[], Awaitable[Sequence[Role]]] | None = None,
    ) -> Outcome:
        """`first` to its end (it makes what the others read), then all roles until the run ends, then nothing.

        later: gives more roles as soon as what they need is there; the run ends with its ShmrlError.
        """
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
            if later is not None:
                self._tasks.append(asyncio.create_task(self._await_more(later)))
            outcome = await self._watch(roles, {_LATER} if later is not None or self._rules.told else set())
            self._rules.ending(outcome)
            await self._flush(outcome)
            return outcome
        finally:
            await self._teardown()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ start

    async def _start(self, role: Role) -> None:
        with role.log.open("ab") as output, _held_back(signal.SIGINT, role.drains):
            process = await asyncio.create_subprocess_exec(
                *role.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=None if role.console else output,
                stderr=output,
                env=child_environment(self._run_id, role.name),
                start_new_session=True,
                pass_fds=() if role.socket is None else (role.socket.fileno(),),
            )
        self._running[role.name], self._started[role.name] = process, role
        with contextlib.suppress(psutil.Error):  # it may have ended already
            root = (process.pid, psutil.Process(process.pid).create_time())
            self._roots.append(root)
            self._janitor.tell(process=root)
        self._tasks.append(asyncio.create_task(self._await_exit(role, process)))
        log.info("started %s (pid %d)", role.name, process.pid)

    async def _await_exit(self, role: Role, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._events.put_nowait(_Exited(role, code))

    async def _await_more(self, later: Callable[[], Awaitable[Sequence[Role]]]) -> None:
        try:
            self._events.put_nowait(await later())
        except ShmrlError as error:
            self._events.put_nowait(error)
        except Exception as error:  # nobody awaits this task
            log.exception("what the other roles need was not found")
            self._events.put_nowait(RunError(told(error)))

    def _offer(self, role: Role) -> None:
        """Start the role when somebody next connects to its socket."""
        assert role.socket is not None
        loop, descriptor = asyncio.get_running_loop(), role.socket.fileno()

        def connected() -> None:
            loop.remove_reader(descriptor)
            self._events.put_nowait(_Wanted(role))

        loop.add_reader(descriptor, connected)

    def _rest(self, role: Role, code: int) -> None:
        """Offer it again a little later; the more often in a row it failed, the later."""
        self._failed[role.name] = self._failed[role.name] + 1 if code else 0
        if code:
            log.warning("%s exited with code %d%s; the run goes on (%s)", role.name, code, _how(code), role.log)
        least, most = RESTING_S
        asyncio.get_running_loop().call_later(min(most, least * 2 ** self._failed[role.name]), self._offer, role)

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(None)

    def _signalled(self, number: signal.Signals) -> None:
        self._interrupts += 1
        self._events.put_nowait(number)

    # ------------------------------------------------------------------------------------------------------ watch

    async def _watch(self, roles: Sequence[Role], more: Set[str] = frozenset()) -> Outcome:
        """Start these roles and take events until the run is over. Without final roles, every role is awaited. more:
        what is awaited beside them."""
        awaited = {role.name for role in roles if role.final} or ({*more} or {role.name for role in roles})
        self._finished = 0.0
        for role in roles:
            if role.socket is None:
                await self._start(role)
            else:
                self._offer(role)
        while awaited:
            event = await self._events.get()
            self._remind(awaited)
            outcome: Outcome | None = None
            if event is None:
                outcome = self._tick()
            elif isinstance(event, _Wanted):
                await self._start(event.role)
            elif isinstance(event, _Exited):
                outcome = await self._exited(event, awaited)
            elif isinstance(event, ShmrlError):
                outcome = Outcome(1, "failed", str(event))
            elif isinstance(event, signal.Signals):
                outcome = self._interrupted(event, roles)
            else:
                roles = [*roles, *event]
                awaited = awaited - {_LATER} | {role.name for role in event if role.final}
                for role in event:
                    await self._start(role)
            if outcome is not None:
                return outcome
        if self._interrupts:
            return Outcome(
                130, "interrupted", f"stopped by {self._asked} after draining; continue with --resume", orderly=True
            )
        return Outcome(0, "finished", "", orderly=True)

    def _remind(self, awaited: set[str]) -> None:
        """Say now and then who is awaited, once some have finished: a run that hangs at its end must say where."""
        now = time.monotonic()
        if self._finished and now - self._finished >= REMIND_S:
            self._finished = now
            log.warning("still waiting for %s", ", ".join(sorted(awaited)))

    def _tick(self) -> Outcome | None:
        outcome = self._on_tick()
        if self._janitor.alive():
            return outcome
        return Outcome(
            1, "failed", f"the janitor (pid {self._janitor.pid}) died; without it the run cannot be cleaned up"
        )

    async def _exited(self, event: _Exited, awaited: set[str]) -> Outcome | None:
        role, code = event.role, event.code
        del self._running[role.name]
        if role.socket is not None:
            self._rest(role, code)
            return None
        accepted = (0, 130) if self._interrupts and role.drains else (0,)
        if role.name in awaited and code in accepted:
            awaited.discard(role.name)
            self._finished = time.monotonic()
            log.info("%s finished", role.name)
            return None
        if self._interrupts and role.drains and code == -signal.SIGINT:
            return Outcome(130, "interrupted", f"stopped by {self._asked} before there was a step to finish")
        if self._restarted[role.name] < role.restarts and not self._interrupts:
            await self._restart(event)
            return None
        if self._rules.spare(role):
            return self._without(event)
        return await self._cause(event)

    def _without(self, event: _Exited) -> Outcome | None:
        """Go on without a role, while there is another one that can do without it."""
        outcome = failure(event.role, event.code)
        if any(self._rules.spare(role) for role in self._started.values() if role.name in self._running):
            log.warning("%s is gone for good; the others go on", event.role.name)
            return None
        return outcome

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
        outcome, self._culprit = failure(event.role, event.code), event.role.name
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
            again = "press it again" if self._asked == "Ctrl-C" else "press Ctrl-C"
            log.info("%s: finishing the step and writing a checkpoint; %s to stop at once", self._asked, again)
            for process in drains:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
            return None
        return Outcome(130, "interrupted", "stopped by Ctrl-C; continue with --resume")

    # --------------------------------------------------------------------------------------------------- teardown

    async def _flush(self, outcome: Outcome) -> None:
        """Let the trainer write what it is writing, for as long as the rules grant."""
        deadline = time.monotonic() + self._rules.flush_s
        if outcome.code == 1 and TRAINER in self._running and self._rules.flushing(self._culprit):
            log.warning("a checkpoint may be written: the trainer has %g s", self._rules.flush_s)
            while self._running[TRAINER].returncode is None and time.monotonic() < deadline:
                if not self._rules.flushing(self._culprit):
                    break
                await asyncio.sleep(0.1)

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


@contextlib.contextmanager
def _held_back(number: signal.Signals, held: bool) -> Iterator[None]:
    """Processes started meanwhile get this signal when they unblock it: a Python that is interrupted while it loads
    prints a traceback, or drops the signal."""
    if not held:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
