"""A deterministic inference engine: every array it returns is a pure function of (seed, version, token, position).

Speaks the routes that `shmrl.inference.client` uses, in vLLM 0.32's encodings. Tests start it in their own event loop
(`async with FakeEngine() as engine: engine.url`) or as a process: `python -m tests.support.fake_engine --port 8000`.
Whoever wants to check bytes asks `Oracle` for the value that a row must have.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

LETTERS = range(64, 90)
"""Ids of a..z in the byte-level tokenizer of `write_tiny`."""


@dataclass(frozen=True)
class Oracle:
    """The functions. Token arrays are ids [n], positions [n] (0 = first of the prompt); a version is an int."""

    seed: int = 0
    layers: int = 4
    top_k: int = 2
    experts: int = 8
    stop_every: int = 8

    def mix(self, what: int, version: Any, tokens: Any, positions: Any) -> np.ndarray:
        """uint64 of the broadcast arguments: splitmix64's finaliser over their sum of products."""
        parts = ((self.seed, 1), (what, 3), (version, 5), (tokens, 7), (positions, 11))
        with np.errstate(over="ignore"):
            x = np.uint64(0)
            for value, salt in parts:
                x = (x + np.asarray(value).astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
                x = x ^ (x >> np.uint64(29))
            x = x * np.uint64(0xBF58476D1CE4E5B9)
            return x ^ (x >> np.uint64(32))

    def sampled(self, version: Any, positions: Any, stop_id: int) -> np.ndarray:
        """int64 [n]: the id drawn at a position: the stop id at every `stop_every`-th one (0: never), else a letter."""
        letters = LETTERS.start + (self.mix(1, version, 0, positions) % np.uint64(len(LETTERS))).astype(np.int64)
        if not self.stop_every:
            return letters
        return np.where((np.asarray(positions) + self.seed) % self.stop_every == 0, stop_id, letters)

    def logprobs(self, version: Any, tokens: Any, positions: Any) -> np.ndarray:
        """float32 [n], in (-4, 0]."""
        return -(self.mix(2, version, tokens, positions) % np.uint64(1000)).astype(np.float32) / np.float32(250)

    def routing(self, version: Any, tokens: Any, positions: Any) -> np.ndarray:
        """uint8 or uint16 [n, layers, top_k], distinct within a row."""
        first = self.mix(
            3, np.asarray(version)[..., None], np.asarray(tokens)[..., None], np.asarray(positions)[..., None]
        )
        first = first + np.arange(self.layers, dtype=np.uint64)
        ids = (first[..., None] + np.arange(self.top_k, dtype=np.uint64)) % np.uint64(self.experts)
        return ids.astype(np.uint8 if self.experts <= 256 else np.uint16)

    def head(self, version: Any, tokens: Any, positions: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n, 1 + k], logprobs float32 [n, 1 + k]): the sampled token first, then k other ids."""
        tokens, positions = np.asarray(tokens)[:, None], np.asarray(positions)[:, None]
        ids = np.concatenate([tokens, (tokens + 1 + np.arange(k)) % 256], axis=1)
        return ids, self.logprobs(version, ids, positions)

    def kept(self, version: int, token: int, position: int) -> list[int]:
        """The sampler's kept ids, ascending, 1 to 5 of them, the token among them."""
        n = 1 + int(self.mix(4, version, token, position) % np.uint64(5))
        return sorted({(token + 3 * i) % 256 if i else token for i in range(n)})


class FakeEngine:
    """Serves an `Oracle`.

    Args:
        version: of the weights it starts with. abort_every: every n-th request ends half-way, finish_reason "abort".
        max_model_len: longer prompts are refused. masks: whether sampling masks are returned.
    """

    def __init__(
        self,
        oracle: Oracle | None = None,
        *,
        version: int = 0,
        abort_every: int = 0,
        max_model_len: int = 1 << 20,
        masks: bool = True,
        routing: bool = True,
    ) -> None:
        self.oracle, self.version, self.abort_every = oracle or Oracle(), version, abort_every
        self.max_model_len, self.masks, self.routing = max_model_len, masks, routing
        self.requests: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.running = 0
        self.open = asyncio.Event()  # cleared: requests wait (`pause`, or a test that wants them in flight)
        self.open.set()
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/collective_rpc", self._load)
        app.router.add_post("/update_weight_version", self._set_version)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/reset_prefix_cache", self._ok)
        app.router.add_get("/health", self._ok)
        return app

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen on loopback; `url` says where."""
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.open.set()
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        abort = bool(self.abort_every) and len(self.requests) % self.abort_every == 0
        self.running += 1
        try:
            await self.open.wait()
        finally:
            self.running -= 1
        if len(body["token_ids"]) >= self.max_model_len:
            message = f"the prompt has {len(body['token_ids'])} tokens, max_model_len is {self.max_model_len}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        return web.json_response({"choices": [self.choice(body["token_ids"], body["sampling_params"], abort)]})

    def choice(self, prompt: list[int], sampling: dict[str, Any], abort: bool = False) -> dict[str, Any]:
        """The one choice of an answer, under the weights of now."""
        n, version = len(prompt), self.version
        room = min(sampling["max_tokens"], self.max_model_len - n)
        stop_id = (sampling.get("stop_token_ids") or [257])[0]
        drawn, finish = self._draw(n, room, stop_id)
        if abort and len(drawn) > 1:
            drawn, finish = drawn[: len(drawn) // 2], "abort"
        positions = np.arange(n, n + len(drawn))
        return {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": stop_id if finish == "stop" else None,
            "token_ids": drawn,
            "routed_experts": self._routing(prompt + drawn, sampling) if self.routing else None,
            "sampling_mask": self._kept(drawn, n, sampling),
            "weight_versions": [{"version": str(version), "start": 0, "end": len(drawn)}],
            "logprobs": {"content": self._content(drawn, positions, sampling.get("logprobs") or 0)},
        }

    def _draw(self, start: int, room: int, stop_id: int) -> tuple[list[int], str]:
        drawn: list[int] = self.oracle.sampled(self.version, np.arange(start, start + room), stop_id).tolist()
        if stop_id in drawn:
            return drawn[: drawn.index(stop_id) + 1], "stop"
        return drawn, "length"

    def _routing(self, tokens: list[int], sampling: dict[str, Any]) -> str:
        start = sampling.get("routed_experts_prompt_start", 0)
        fed = np.array(tokens[start:-1], np.int64)
        return self.npy(self.oracle.routing(self.version, fed, np.arange(start, start + len(fed))))

    @staticmethod
    def npy(rows: np.ndarray) -> str:
        """An array as vLLM sends it: base64 of a .npy."""
        out = io.BytesIO()
        np.save(out, rows)
        return base64.b64encode(out.getvalue()).decode()

    def _kept(self, drawn: list[int], start: int, sampling: dict[str, Any]) -> list[list[int]] | None:
        if not self.masks or (sampling.get("top_k") or 0) <= 0:
            return None
        return [self.oracle.kept(self.version, token, start + i) for i, token in enumerate(drawn)]

    def _content(self, drawn: list[int], positions: np.ndarray, k: int) -> list[dict[str, Any]]:
        heads = self.oracle.head(self.version, np.array(drawn, np.int64), positions, k)
        return [
            {
                "token_id": ids[0],
                "logprob": values[0],
                "rank": 1,
                "top_logprobs": [{"token_id": a, "logprob": b, "rank": 1} for a, b in zip(ids, values, strict=True)],
            }
            for ids, values in zip(heads[0].tolist(), heads[1].tolist(), strict=True)
        ]

    async def _load(self, request: web.Request) -> web.Response:
        self.loaded.append((await request.json())["args"][0])
        return web.json_response({"results": [None]})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = int(re.search(r"\d+$", str((await request.json())["new_version"]))[0])  # type: ignore[index]
        return web.json_response({"weight_version": str(self.version)})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _pause(self, request: web.Request) -> web.Response:
        self.open.clear()
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.open.set()
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "policy", "root": "someone/policy", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running {self.running}\nvllm:kv_cache_usage_perc 0.1\n")

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})


async def _main(arguments: argparse.Namespace) -> None:
    shape = {key: getattr(arguments, key) for key in ("seed", "layers", "top_k", "experts", "stop_every")}
    engine = FakeEngine(Oracle(**shape), abort_every=arguments.abort_every, max_model_len=arguments.max_model_len)
    await engine.start(arguments.port)
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=1 << 20)
    for name, default in (
        ("seed", 0),
        ("layers", 4),
        ("top-k", 2),
        ("experts", 8),
        ("stop-every", 8),
        ("abort-every", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(_main(parser.parse_args()))
