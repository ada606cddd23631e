"""The policy as the engines serve it: reached and checked at the start, updated every step, kept up to date in between.

One `Policy` per run, in the orchestrator. A failed update leaves the old weights serving and ends the run, unless
engines may be restarted (`[run.restarts]`): then it is repeated when they are back, and an engine that comes back by
itself is brought to the current version. Requests of the env workers wait meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from shmrl.config import RunTree
from shmrl.errors import EngineError
from shmrl.inference.client import EngineClient
from shmrl.inference.vllm import checks
from shmrl.monitor.log import tail
from shmrl.orchestrator.link import TrainerLink

log = logging.getLogger(__name__)

WATCH_S = 1.0


class Policy:
    """What the engines serve. `derive_masks`: they send no sampling masks of their own."""

    def __init__(self, engine: EngineClient, tree: RunTree, link: TrainerLink) -> None:
        self.derive_masks = False
        self._engine, self._tree, self._link = engine, tree, link
        self._served: tuple[str, int] | None = None  # directory and version, once every engine has it
        self._updating = asyncio.Lock()

    async def reach(self, timeout_s: float) -> None:
        """Wait for the engines, and check that they do what this run needs; EngineError with an engine's last lines."""
        try:
            await self._engine.health(timeout_s)
            if self._tree.inference.backend == "vllm":
                self.derive_masks = await checks.greet(self._engine, self._tree, await self._sender())
        except EngineError as error:
            raise EngineError(f"{error}{self._last_lines()}") from error

    async def _sender(self) -> int | None:
        """Where rank 0 broadcasts weights, if it does."""
        return await self._link.sender() if self._tree.inference.weight_transfer == "broadcast" else None

    def _last_lines(self) -> str:
        path = self._tree.run.output_dir / "logs" / "latest" / "inference.log"
        if self._tree.inference.urls or not path.exists():
            return ""
        return f"; last lines of {path}:" + "".join(f"\n  | {line}" for line in tail(path))

    async def serve(self, path: str, version: int) -> None:
        """Every engine serves this version when it returns. EngineError: those that failed keep their old weights."""
        async with self._updating:
            for attempts_left in reversed(range(1 + self._tree.run.restarts.inference)):
                try:
                    await self._update(path, version)
                    return
                except EngineError as error:
                    if not attempts_left:
                        raise
                    log.warning("version %d is not served yet, it is tried again: %s", version, error)
                    await self._engine.health(self._tree.orchestrator.connect_timeout_s)

    async def _update(self, path: str, version: int) -> None:
        if self._tree.inference.colocate:
            await self._engine.wake()
        mode = self._tree.inference.update_mode
        await self._engine.update_weights(path, version, mode=mode, sender=await self._sender())
        self._served = (path, version)

    async def leave_accelerator(self) -> None:
        """With `inference.colocate`: replies in the making are finished, then the engines' memory is the trainer's."""
        if self._tree.inference.colocate:
            await self._engine.pause("wait")
            await self._engine.sleep()

    async def watch(self) -> None:
        """Bring engines that were restarted to the current version; returns at once where none may be."""
        while self._tree.run.restarts.inference:
            await asyncio.sleep(WATCH_S)
            served = self._served
            if served is None or self._updating.locked():
                continue
            labels = await self._engine.labels()
            if all(label in (None, str(served[1])) for label in labels) or self._served != served:
                continue
            log.warning("an engine serves version %s instead of %d: it is updated", labels, served[1])
            async with self._updating:
                if self._served == served:
                    await self._catch_up(*served)

    async def _catch_up(self, path: str, version: int) -> None:
        try:
            await self._update(path, version)
        except EngineError as error:  # it may have died again, or a newer version may be there: the next look tells
            log.warning("not brought to version %d: %s", version, error)
