"""The policy as the engines serve it: reached and checked at the start, updated every step, kept up to date in between.

One `Policy` per run, in the orchestrator. A failed update leaves the old weights serving and ends the run, unless
engines may be restarted (`[run.restarts]`): then it is repeated when they are back, and an engine that comes back by
itself is brought to the current version. Requests of the env workers wait meanwhile. Of several engines, one that
stays away drops out, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

from shmrl.config import RunTree
from shmrl.errors import EngineError
from shmrl.inference.client import EngineClient
from shmrl.inference.vllm import checks
from shmrl.monitor.log import tail
from shmrl.orchestrator.link import TrainerLink

log = logging.getLogger(__name__)

WATCH_S = 1.0
AWAY_S = 20.0  # of an engine beside others: it drops out then
TRIES = 3  # of an update, while engines come and go


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
            restarts, tries = self._tree.run.restarts.inference, TRIES
            while True:
                try:
                    await self._update(path, version)
                    return
                except EngineError as error:
                    if restarts:
                        restarts -= 1
                        log.warning("version %d is not served yet, it is tried again: %s", version, error)
                        await self._back(error)
                    elif not tries or not await self._go_on(error):
                        raise
                    else:
                        tries -= 1

    async def _back(self, error: EngineError) -> None:
        """Wait until the engines are. EngineError where none comes back; of several, those that do not drop out."""
        try:
            await self._engine.health(self._tree.orchestrator.connect_timeout_s)
        except EngineError:
            if not await self._go_on(error):
                raise

    async def _go_on(self, error: EngineError) -> bool:
        """Whether an update may be tried again, without the engines that stay away: never for what an engine refuses,
        nor without any."""
        away = [url for url in self._engine.urls if url in error.away]  # but for those that have dropped out meanwhile
        if not error.away or self._engine.urls == away[:1]:
            return False
        healthy = await asyncio.gather(*[self._engine.is_healthy(url, AWAY_S) for url in away])
        return all(self.drop(url, error) for url, is_healthy in zip(away, healthy, strict=True) if not is_healthy)

    def drop(self, url: str, why: object) -> bool:
        """Go on without an engine, if there is another."""
        if self._engine.urls == [url]:
            return False
        if url not in self._engine.urls:
            return True
        self._engine.drop(url)
        log.error("the engine at %s drops out, %d go on: %s", url, len(self._engine.urls), why)
        return True

    def drop_host(self, host: str, why: object) -> None:
        """The engines of a node that is lost."""
        for url in list(self._engine.urls):
            if urlsplit(url).hostname == host:
                self.drop(url, why)

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
