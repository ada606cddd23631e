"""Client of one or more inference engines that speak vLLM's routes: our embedded server, or vLLM itself.

Env workers generate through it, the orchestrator watches load and swaps weights. Imports no torch and no numpy: arrays
stay in their wire form here, and `shmrl.payload` decodes them into the arena. One client per event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from shmrl.errors import EngineError

log = logging.getLogger(__name__)
LOAD_METHOD = "shmrl_load_weights"
FILTERED_BELOW = -9000.0  # engines write -9999.0 for the -inf of a token the sampler had excluded
MAX_FAULTS = 3  # attempts of a request that reached an engine and failed there; an engine that is away is waited for


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice, as the engine sent it.

    Attributes:
        token_ids: T sampled ids. logprobs: T of them, the sampled tokens' own.
        finish_reason: "stop", "length" or "abort"; stop_reason: the stop id or string that ended it.
        top_logprobs: (ids, values) per token, the sampled token first, -9999.0 = excluded; None when not asked for.
        routed_experts: base64 of a .npy, [prompt + T - 1 - routed_experts_prompt_start, layers, top_k]; None if absent.
        sampling_mask: ids the sampler kept, ascending, per token; None where nothing was truncated or it is not known.
        weight_versions: (version, start, end) over the tokens; empty from engines that do not say.
        url: the engine that answered.

    Example: Generation([113, 4], "length", None, [-2.0, -0.9], None, "k05V...", [[19, 113], [4]], [("7", 0, 2)], url)
    """

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[float]
    top_logprobs: list[tuple[list[int], list[float]]] | None
    routed_experts: str | None
    sampling_mask: list[list[int]] | None
    weight_versions: list[tuple[str, int, int]]
    url: str


class EngineClient:
    """Spreads requests over engines (least in flight, or fixed by cache_salt) and retries what may be retried.

    Args:
        urls: base addresses, e.g. ["http://127.0.0.1:8000"].
        timeout_s: deadline of one `generate`, retries included. token: bearer token, where the engine wants one.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 600.0, token: str | None = None) -> None:
        if not urls:
            raise EngineError("an engine client needs at least one url")
        self.urls = [url.rstrip("/") for url in urls]
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._inflight = dict.fromkeys(self.urls, 0)
        self._told: set[tuple[str, str]] = set()
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
    ) -> Generation:
        """Continue a prompt. `sampling` holds vLLM's names; without `logprobs` only the sampled tokens' are asked for.

        Raises EngineError: refused by the engine, unreadable, or not answered within the deadline. Cancelling drops
        the connection, which aborts the request on the engine.
        """
        params = {"logprobs": 0, **sampling}
        if routed_experts_prompt_start:
            params["routed_experts_prompt_start"] = routed_experts_prompt_start
        body = {"token_ids": token_ids, "sampling_params": params, "stream": False}
        body |= {k: v for k, v in (("cache_salt", cache_salt), ("request_id", request_id)) if v is not None}
        url, text = await self._with_retries("/inference/v1/generate", body, cache_salt)
        return await asyncio.get_running_loop().run_in_executor(self._reader, _read_generation, text, url, params)

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
                reason = _said(error)
            if time.monotonic() > deadline:
                raise EngineError(f"{url} is not healthy: {reason}")
            await asyncio.sleep(0.1)

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Per url, every Prometheus sample by name (summed over labels), e.g. "vllm:kv_cache_usage_perc" in 0..1."""
        found = await self._everywhere(lambda url: self._control("GET", url, "/metrics"))
        return {url: parse_metrics(text) for url, text in zip(self.urls, found, strict=True)}

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop generation on every engine; requests sent meanwhile queue. See vLLM's /pause for the modes."""
        await self._everywhere(lambda url: self._control("POST", url, f"/pause?mode={mode}"))

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._everywhere(lambda url: self._control("POST", url, "/resume"))

    async def update_weights(
        self, path: str, version: int | str, mode: Literal["keep", "wait", "abort"] = "keep"
    ) -> None:
        """Load the checkpoint directory `path` on every engine, and label what is drawn from then on with `version`.

        Engines are resumed whatever happens. EngineError names the engines that failed; those keep their old weights.
        """
        try:
            await self.pause(mode)
            await self._everywhere(lambda url: self._load(url, path, str(version)))
        finally:
            await asyncio.shield(self.resume())

    async def _load(self, url: str, path: str, version: str) -> None:
        await self._control("POST", url, "/collective_rpc", {"method": LOAD_METHOD, "args": [path], "kwargs": {}})
        await self._control("POST", url, "/reset_prefix_cache")
        await self._control("POST", url, "/update_weight_version", {"new_version": version})

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
            raise EngineError("; ".join(map(str, failed))) from failed[0]
        return list(found)

    async def _control(self, method: str, url: str, path: str, body: Any = None) -> str:
        """One attempt, since these calls change state; the body of a 200, EngineError otherwise."""
        try:
            status, text = await self._call(method, url, path, body, self._timeout_s)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineError(f"{url}{path}: {_said(error)}") from error
        if status != 200:
            raise EngineError(f"{url}{path} answered {status}: {_message(text)}")
        return text

    async def _with_retries(self, path: str, body: Any, key: str | None) -> tuple[str, str]:
        """(url, body). Waits for engines that are away or busy until the deadline; gives up early on real faults."""
        deadline, faults, tries, avoid = time.monotonic() + self._timeout_s, 0, 0, None
        while True:
            url = self._choose(key, avoid)
            self._inflight[url] += 1
            try:
                status, text = await self._call("POST", url, path, body, deadline - time.monotonic())
                if status == 200:
                    return url, text
                reason, fault = f"{status}: {_message(text)}", status not in (429, 503)
                if 400 <= status < 500 and fault:
                    raise EngineError(f"{url}{path} answered {reason}")
            except aiohttp.ClientConnectorError as error:
                reason, fault = _said(error), False
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                reason, fault = _said(error), True
            finally:
                self._inflight[url] -= 1
            faults, tries, avoid = faults + fault, tries + 1, url
            wait = min(5.0, 0.1 * 2**tries) * random.uniform(0.5, 1.5)
            if faults >= MAX_FAULTS or time.monotonic() + wait > deadline:
                raise EngineError(f"{url}{path}: {reason} (attempt {tries})")
            self._tell(url, reason)
            await asyncio.sleep(wait)

    def _choose(self, key: str | None, avoid: str | None) -> str:
        """The engine for this key, else the least busy one; not the one that has just failed where there is another."""
        urls = [url for url in self.urls if url != avoid] or self.urls
        if key is not None:
            return urls[zlib.crc32(key.encode()) % len(urls)]
        return min(urls, key=lambda url: (self._inflight[url], random.random()))

    def _tell(self, url: str, reason: str) -> None:
        """Each kind of trouble is logged when it first happens, not once per request."""
        if (url, reason) not in self._told:
            self._told.add((url, reason))
            log.warning("%s: %s; retrying (further ones are not logged)", url, reason)

    async def _call(self, method: str, url: str, path: str, body: Any, timeout_s: float) -> tuple[int, str]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        timeout = aiohttp.ClientTimeout(total=max(timeout_s, 0.001), sock_connect=10)
        async with self._session.request(method, url + path, json=body, timeout=timeout) as response:
            return response.status, await response.text(errors="replace")


# ----------------------------------------------------------------------------------------------------------- parsing


def _read_generation(text: str, url: str, sampling: Mapping[str, Any]) -> Generation:
    """Runs beside the event loop. Heads are a JSON object per id, megabytes of them in a long answer."""
    try:
        answer = json.loads(text, object_hook=_let_the_loop_turn)
    except ValueError as error:
        raise EngineError(f"{url} sent no JSON: {error}") from error
    return parse_generation(answer, url, sampling)


def _let_the_loop_turn(entry: dict[str, Any]) -> dict[str, Any]:
    """A call of Python code per object: the decoder alone would keep the interpreter lock to the end."""
    return entry


def parse_generation(answer: Mapping[str, Any], url: str, sampling: Mapping[str, Any]) -> Generation:
    """The first choice of a /inference/v1/generate answer (the forms of vLLM 0.30 and 0.32); EngineError if unreadable.

    Engines that send no sampling mask still send every kept id when `logprobs` >= `top_k`: those above -9000.
    """
    try:
        choice = answer["choices"][0]
        content = (choice.get("logprobs") or {}).get("content")
        if content is None or len(content) != len(choice["token_ids"]):
            have = "none" if content is None else len(content)
            raise EngineError(f"{url} sent {len(choice['token_ids'])} tokens with {have} log-probabilities")
        heads, mask = None, choice.get("sampling_mask")
        if sampling.get("logprobs"):
            heads = [
                ([_id(e) for e in c["top_logprobs"]], [float(e["logprob"]) for e in c["top_logprobs"]]) for c in content
            ]
        return Generation(
            token_ids=list(choice["token_ids"]),
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            logprobs=[float(entry["logprob"]) for entry in content],
            top_logprobs=heads,
            routed_experts=choice.get("routed_experts"),
            sampling_mask=_derived_mask(heads, sampling) if mask is None else mask,
            weight_versions=[(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ()],
            url=url,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{url} sent an answer this client cannot read: {type(error).__name__}: {error}") from error


def _id(entry: Mapping[str, Any]) -> int:
    """The token id of a log-probability entry: `token_id` (0.32) or the text "token_id:N" (0.30)."""
    return int(entry["token_id"]) if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))


def _derived_mask(
    heads: list[tuple[list[int], list[float]]] | None, sampling: Mapping[str, Any]
) -> list[list[int]] | None:
    """Kept ids from heads that hold all of them. None when they do not: too narrow, or raw log-probabilities."""
    top_k = int(sampling.get("top_k") or 0)
    if heads is None or top_k < 1 or int(sampling["logprobs"]) < top_k:
        return None
    masks = []
    for ids, values in heads:
        kept = {i: value for i, value in zip(ids, values, strict=True) if value > FILTERED_BELOW}
        if not math.isclose(sum(map(math.exp, kept.values())), 1.0, abs_tol=1e-3):
            return None
        masks.append(sorted(kept))
    return masks


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name: value}, summed over label sets."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def _message(text: str) -> str:
    """What an error body says."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200] or "no body"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
