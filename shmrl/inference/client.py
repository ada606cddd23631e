"""Client of one or more inference engines that speak vLLM's routes: our embedded server, or vLLM itself.

Env workers generate through it, the orchestrator watches load and swaps weights. Imports no torch. Routing stays in its
wire form here; `shmrl.payload` decodes it into the arena. One client per event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from shmrl.errors import EngineError, told
from shmrl.inference.answers import Generation, parse_metrics, read_generation

log = logging.getLogger(__name__)
LOAD_METHOD, RECEIVE_METHOD = "shmrl_load_weights", "shmrl_receive_weights"
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
KEEPALIVE_S = 2.0  # vLLM closes idle connections after 5 s, and a call that meets that is lost
STICKY_EXCESS = 16  # a prefix stays on its engine until that has so many more requests in flight than the least busy
MAX_FAULTS = 3  # attempts of a request that reached an engine and failed there; an engine that is away is waited for


class EngineClient:
    """Spreads requests over engines and retries what may be retried.

    Requests of one cache_salt share a prefix, and go to the same engine as long as it is not much busier than the
    others; those without go to the one with the fewest in flight. An engine without vLLM's token route is asked through
    completions, with token ids as well.

    Args:
        urls: base addresses, e.g. ["http://127.0.0.1:8000"]. near: those of them that are asked while they answer.
        timeout_s: deadline of one `generate`, retries included. token: bearer token, where the engine wants one.
    """

    def __init__(
        self, urls: Sequence[str], *, near: Sequence[str] = (), timeout_s: float = 600.0, token: str | None = None
    ) -> None:
        if not urls:
            raise EngineError("an engine client needs at least one url")
        self.urls = [url.rstrip("/") for url in urls]
        self._near = [url.rstrip("/") for url in near]
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._inflight = dict.fromkeys(self.urls, 0)
        self._calls: dict[str, set[asyncio.Timeout]] = {url: set() for url in self.urls}
        self._told: set[tuple[str, str]] = set()
        self._without_generate: set[str] = set()
        self._session: aiohttp.ClientSession | None = None
        self._reader = ThreadPoolExecutor(1, "answers")  # one: more would only take the interpreter from the loop

    async def generate(
        self,
        token_ids: list[int],
        sampling: Mapping[str, Any],
        *,
        routed_experts_prompt_start: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
        derive_masks: bool = False,
    ) -> Generation:
        """Continue a prompt. `sampling` holds vLLM's names; without `logprobs` only the sampled tokens' are asked for.

        derive_masks: the engine sends no sampling masks of its own; they are read off `top_k` log-probabilities, of
        which the answer keeps as many as `sampling` asks for.

        Raises EngineError: refused by the engine, unreadable, or not answered within the deadline. Cancelling drops
        the connection, which aborts the request on the engine.
        """
        params = {"logprobs": 0, **sampling}
        head = int(params["logprobs"])
        if derive_masks:
            params["logprobs"] = max(head, int(params.get("top_k") or 0))
        if routed_experts_prompt_start:
            params["routed_experts_prompt_start"] = routed_experts_prompt_start
        common = {k: v for k, v in (("cache_salt", cache_salt), ("request_id", request_id)) if v is not None}
        url, body = await self._with_retries(token_ids, params, common, cache_salt)
        return await asyncio.get_running_loop().run_in_executor(self._reader, read_generation, body, url, params, head)

    async def prompt_logprobs(self, url: str, token_ids: list[int]) -> list[float]:
        """log p of token_ids[1:] given what precedes them, under the weights of now; vLLM only."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        text = await self._control("POST", url, COMPLETIONS, body | {"cache_salt": secrets.token_hex(8)})
        try:
            rows = json.loads(text)["choices"][0]["prompt_logprobs"][1:]
            return [float(row[str(token)]["logprob"]) for row, token in zip(rows, token_ids[1:], strict=True)]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{url} scored no prompt: {told(error)}") from error

    # ------------------------------------------------------------------------------------------------ load and weights

    async def health(self, timeout_s: float = 600.0) -> None:
        """Wait until every engine is healthy; EngineError says which is not, and why, after timeout_s."""
        await self._everywhere(lambda url: self._await_healthy(url, time.monotonic() + timeout_s))

    async def _await_healthy(self, url: str, deadline: float) -> None:
        reason = "no answer yet"
        while True:
            try:
                status, _ = await self._call("GET", url, "/health", None, 5.0)
                if status == 200:
                    return
                reason = f"status {status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                reason = told(error)
            if time.monotonic() > deadline or url not in self.urls:
                raise EngineError(f"{url} is not healthy: {reason}")
            await asyncio.sleep(0.1)

    async def is_healthy(self, url: str, timeout_s: float) -> bool:
        """Whether an engine is, within timeout_s."""
        try:
            await self._await_healthy(url, time.monotonic() + timeout_s)
        except EngineError:
            return False
        return True

    def drop(self, url: str) -> None:
        """Go on without an engine: nobody asks it any more, whoever shares the list `urls` included, and what it was
        asked for fails now, as it does of an engine that is away."""
        self.urls.remove(url)
        for call in self._calls[url]:
            call.reschedule(0.0)

    async def cards(self) -> list[dict[str, Any]]:
        """What each engine says of its (first) model: id, root (its directory or name), max_model_len; EngineError."""
        found = await self._everywhere(lambda url: self._control("GET", url, "/v1/models"))
        return [dict(json.loads(text)["data"][0]) for text in found]

    async def versions(self) -> list[str]:
        """What each engine calls its version, e.g. "0.30.0"; EngineError where one does not say."""
        found = await self._everywhere(lambda url: self._control("GET", url, "/version"))
        return [str(json.loads(text)["version"]) for text in found]

    async def labels(self) -> list[str | None]:
        """The weight version each engine says it serves; None where it is away or does not say."""

        async def label(url: str) -> str | None:
            try:
                return str(json.loads(await self._control("GET", url, "/weight_info"))["weight_version"])
            except (EngineError, ValueError, KeyError):
                return None

        return await self._everywhere(label)

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Per url, every Prometheus sample by name (summed over labels), e.g. "vllm:kv_cache_usage_perc" in 0..1."""
        urls = list(self.urls)
        found = await self._everywhere(lambda url: self._control("GET", url, "/metrics"))
        return {url: parse_metrics(text) for url, text in zip(urls, found, strict=True)}

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop generation on every engine; requests sent meanwhile queue. See vLLM's /pause for the modes."""
        await self._everywhere(lambda url: self._control("POST", url, f"/pause?mode={mode}"))

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._everywhere(lambda url: self._control("POST", url, "/resume"))

    async def update_weights(
        self,
        path: str,
        version: int | str,
        mode: Literal["keep", "wait", "abort"] = "keep",
        sender: int | None = None,
    ) -> None:
        """Load the checkpoint directory `path` on every engine, and label what is drawn from then on with `version`.

        sender: the port where trainer rank 0, on this machine, broadcasts it; None: the engines read the directory.
        Engines are resumed whatever happens. EngineError names the engines that failed; those keep their old weights.
        """
        files = await self.weight_files(path, sender)
        try:
            await self.pause(mode)
            await self._everywhere(lambda url: self._load(url, files[url], str(version)))
        finally:
            await asyncio.shield(self.resume())

    async def weight_files(self, path: str, sender: int | None = None) -> dict[str, list[str]]:
        """What the workers at each url can load for `path`: the directory itself, or files that they received."""
        if sender is None:
            return {url: [path] for url in self.urls}
        own = await self._everywhere(_own_address)
        urls = list(self.urls)
        host = next((address for address in own if not ip_address(address).is_loopback), own[0])
        transfer = (host, str(sender), secrets.token_hex(8), path)

        async def receive(url: str) -> list[str]:
            members = (str(1 + urls.index(url)), str(1 + len(urls)))
            results = await self.call_workers(url, RECEIVE_METHOD, *transfer, *members)
            return [file for result in results for file in result.get("files", ())]

        return dict(zip(urls, await self._everywhere(receive), strict=True))

    async def _load(self, url: str, files: list[str], version: str) -> None:
        await self.call_workers(url, LOAD_METHOD, *files)
        await self._control("POST", url, "/reset_prefix_cache")
        await self._control("POST", url, "/update_weight_version", {"new_version": version}, optional=True)

    async def call_workers(self, url: str, method: str, *args: str) -> list[Any]:
        """Call a method of an engine's every worker; their results. EngineError if one of them says it failed."""
        body = {"method": method, "args": list(args), "kwargs": {}}
        text = await self._control("POST", url, "/collective_rpc", body)
        results = json.loads(text).get("results") or [] if text else []
        failed = [result["error"] for result in results if isinstance(result, dict) and "error" in result]
        if failed:
            raise EngineError(f"{url}: {method}: {failed[0]}")
        return list(results)

    async def sleep(self) -> None:
        """Give the engines' accelerator memory to somebody else: weights go to the host, the KV cache is dropped."""
        await self._everywhere(lambda url: self._control("POST", url, "/sleep?level=1"))

    async def wake(self) -> None:
        """Take the memory back after `sleep`."""
        await self._everywhere(lambda url: self._control("POST", url, "/wake_up"))

    async def aclose(self) -> None:
        """Close the connections."""
        self._reader.shutdown(wait=False)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # ------------------------------------------------------------------------------------------------------- transport

    async def _everywhere(self, call: Callable[[str], Awaitable[Any]]) -> list[Any]:
        """One call per engine, all at once, all awaited; EngineError with every failure."""
        found = await asyncio.gather(*(call(url) for url in self.urls), return_exceptions=True)
        failed = [error for error in found if isinstance(error, BaseException)]
        for error in failed:
            if not isinstance(error, EngineError):
                raise error
        if failed:
            whole = EngineError("; ".join(map(str, failed)))
            whole.away = tuple(url for error in failed if isinstance(error, EngineError) for url in error.away)
            raise whole from failed[0]
        return list(found)

    async def _control(self, method: str, url: str, path: str, body: Any = None, *, optional: bool = False) -> str:
        """One attempt, since these calls change state; the body of a 200, EngineError otherwise.

        optional: some versions have no such route, and nothing depends on it.
        """
        try:
            status, answer = await self._call(method, url, path, body, self._timeout_s)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            away = EngineError(f"{url}{path}: {told(error)}")
            away.away = (url,)
            raise away from error
        if status != 200 and not (optional and status == 404):
            raise EngineError(f"{url}{path} answered {status}: {_message(answer)}")
        return answer.decode(errors="replace")

    def _request(
        self, url: str, token_ids: list[int], params: dict[str, Any], common: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """(path, body) of a generation in the dialect of this engine."""
        if url not in self._without_generate:
            return GENERATE, {"token_ids": token_ids, "sampling_params": params, "stream": False, **common}
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # texts of ids are not unique
        return COMPLETIONS, {"prompt": token_ids, **params, **ids, "stream": False, **common}

    async def _with_retries(
        self, token_ids: list[int], params: dict[str, Any], common: dict[str, Any], key: str | None
    ) -> tuple[str, bytes]:
        """(url, body). Waits for engines that are away or busy until the deadline; gives up early on real faults."""
        deadline, faults, tries, avoid = time.monotonic() + self._timeout_s, 0, 0, None
        while True:
            url = self._choose(key, avoid)
            path, body = self._request(url, token_ids, params, common)
            self._inflight[url] += 1
            try:
                status, answer = await self._call("POST", url, path, body, deadline - time.monotonic())
                if status == 200:
                    return url, answer
                if status == 404 and path == GENERATE:
                    self._without_generate.add(url)
                    continue
                reason, fault = f"{status}: {_message(answer)}", status not in (429, 503)
                if 400 <= status < 500 and fault:
                    raise EngineError(f"{url}{path} answered {reason}")
            except aiohttp.ClientConnectorError as error:
                reason, fault = told(error), False
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                reason, fault = told(error), True
            finally:
                self._inflight[url] -= 1
            faults, tries, avoid = faults + fault, tries + 1, url
            wait = min(5.0, 0.1 * 2**tries) * random.uniform(0.5, 1.5)
            if faults >= MAX_FAULTS or time.monotonic() + wait > deadline:
                raise EngineError(f"{url}{path}: {reason} (attempt {tries})")
            self._tell(url, reason)
            await asyncio.sleep(wait)

    def _choose(self, key: str | None, avoid: str | None) -> str:
        """The engine for this key, else the least busy one; a near one before others, and not the one that has just
        failed where there is another."""
        others = [[url for url in urls if url != avoid] for urls in (self._near, self.urls)]
        urls = others[0] or others[1] or self.urls
        idlest = min(urls, key=lambda url: (self._inflight[url], random.random()))
        if key is None:
            return idlest
        sticky = urls[zlib.crc32(key.encode()) % len(urls)]
        return sticky if self._inflight[sticky] <= self._inflight[idlest] + STICKY_EXCESS else idlest

    def _tell(self, url: str, reason: str) -> None:
        """Each kind of trouble is logged when it first happens, not once per request."""
        if (url, reason) not in self._told:
            self._told.add((url, reason))
            log.warning("%s: %s; retrying (further ones are not logged)", url, reason)

    async def _call(self, method: str, url: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        timeout = aiohttp.ClientTimeout(total=max(timeout_s, 0.001), sock_connect=10)
        async with asyncio.timeout(None) as until_dropped:
            self._calls[url].add(until_dropped)
            try:
                async with self._session.request(method, url + path, json=body, timeout=timeout) as response:
                    return response.status, await response.read()
            finally:
                self._calls[url].discard(until_dropped)


async def _own_address(url: str) -> str:
    """This machine's address on the way to an engine."""
    parts = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        )
    except OSError as error:
        away = EngineError(f"{url}: {told(error)}")
        away.away = (url,)
        raise away from error
    writer.close()
    return str(writer.get_extra_info("sockname")[0])


# ---------------------------------------------------------------------------------------------------------- messages


def _message(body: bytes) -> str:
    """What an error body says."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no body"
