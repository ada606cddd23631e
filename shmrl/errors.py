"""The error tree of shmrl: every error a user can meet, in one place.

Three rules. A subclass says *what kind* of thing went wrong, the message carries the numbers a person needs (what was
asked, what there is, who holds it, what to do). Errors that have a standard meaning are also the standard type
(`ArenaFull` is an `OSError` with ENOSPC, `ViewsAlive` a `BufferError`). An episode's own failure is data, not an
exception: it travels as `types.ErrorInfo` and is counted.

Imported by every room; imports nothing.
"""

from __future__ import annotations

import errno


class ShmrlError(Exception):
    """Base of everything shmrl raises on purpose."""


def told(error: BaseException) -> str:
    """What a person reads of an error: the message of one of ours, which says all; of any other its type, too.

    Examples: told(RunError("no batch")) == "no batch"; told(KeyError("x")) == "KeyError: 'x'"
    """
    text = str(error)
    if isinstance(error, ShmrlError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


COMPLAINT = "shmrl: error: "
"""What a command's last words begin with."""


# ---------------------------------------------------------------------------------------------------- configuration


class Faults(ShmrlError):
    """Several things that are wrong at once: `problems` lists every one that was found, one line each."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(Faults):
    """The configuration cannot work; the CLI exits with 2."""


# ------------------------------------------------------------------------------------------------------------ arena


class ArenaError(ShmrlError):
    """Base of the arena's errors."""


class ArenaFull(ArenaError, OSError):
    """No space before the deadline (errno ENOSPC). The message names the top holders and the limit that refused."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.args[1])


class StaleHandle(ArenaError):
    """The block behind this handle was freed, or its descriptor belongs to a later generation."""


class NotSealed(ArenaError):
    """The block is still being written."""


class AlreadyFreed(ArenaError):
    """A second free of one generation, or a seal of a block that was discarded meanwhile."""


class ViewsAlive(ArenaError, BufferError):
    """The view has live exports (arrays made from it); its data stays valid until they are gone."""


class ChecksumError(ArenaError):
    """Stored bytes do not match their crc32c. Names field and row block."""


class PeerDied(ArenaError):
    """A wait ended because the only process that could have released the space died."""


class PeerStalled(ArenaError):
    """A live process held the allocator's lock past the deadline (stopped, or starved)."""

    def __init__(self, name: str, pid: int, held_s: float, stopped: bool = False) -> None:
        self.name, self.pid, self.held_s, self.stopped = name, pid, held_s, stopped
        state = f"stopped (kill -CONT {pid})" if stopped else "alive"
        super().__init__(f"{name} (pid {pid}) has held the arena's lock for {held_s:.1f} s and is {state}")


class TooManyProcesses(ArenaError):
    """Every process slot of the arena is taken by a live process."""


class NotOwner(ArenaError):
    """Only the attachment that owns a block may free or ship it; adopt it first."""


class ArenaClosed(ArenaError):
    """The arena was closed, or this process is a forked child of the one that attached."""


class ArenaCorrupt(ArenaError):
    """The control words contradict each other. Nothing was read or changed."""


class ForeignArena(ArenaError):
    """The handle or address belongs to another arena, node, boot or uid."""


# ---------------------------------------------------------------------------------------------------------- payload


class PayloadError(ShmrlError):
    """Arrays that cannot be right: names field, position and value."""

    def __init__(
        self, message: str, *, field: str | None = None, position: object = None, value: object = None
    ) -> None:
        self.field, self.position, self.value = field, position, value
        super().__init__(message)

    @classmethod
    def of(cls, field: str, problem: str, position: object = None, value: object = None) -> PayloadError:
        """The error "field: problem"."""
        return cls(f"{field}: {problem}", field=field, position=position, value=value)


class MissingField(PayloadError):
    """The engine returned nothing at all for a field that the run captures."""


class LostPayload(ShmrlError):
    """A referenced block is gone or was discarded. Names the block and whose it was."""


class NodeError(ShmrlError):
    """A node server could not be reached in time, or refused. Names its url and what was tried."""


# -------------------------------------------------------------------------------------------- engines, environments


class EngineError(ShmrlError):
    """An inference engine answered with an error, or with something this client cannot read. away: the engines that
    could not be reached at all, by url."""

    away: tuple[str, ...] = ()


class EnvError(ShmrlError):
    """Base of the env servers' errors, as the client sees them."""


class ProtocolError(EnvError):
    """A message that is not the protocol: frame count, method, encoding, or a value msgpack cannot carry."""


class WorkerDied(EnvError):
    """The env worker that ran this request died; the message carries the tail of its log."""


class ServerDied(EnvError):
    """The env server could not be reached, or exited while it was awaited."""


class TasksetError(EnvError):
    """The environment or its task set raised while loading. Says what and where; the server's log has the traceback."""


# -------------------------------------------------------------------------------------------------------------- run


class RunError(ShmrlError):
    """The run cannot go on (empty batches, leaked blocks, a peer that vanished)."""


class PortInUse(Faults, RunError):
    """Derived or configured ports are taken; names the holders where they can be read."""


class ProcessFailed(RunError):
    """A role exited on its own. `name`, `code`, and the last lines of its log."""

    def __init__(self, name: str, code: int, log_path: str = "", tail: str = "") -> None:
        self.name, self.code, self.log_path, self.tail = name, code, log_path, tail
        super().__init__(f"{name} exited with code {code}" + (f"; log: {log_path}" if log_path else ""))
