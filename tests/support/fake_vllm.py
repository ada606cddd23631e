"""`FakeEngine` as a vLLM: its routes and dialects as they were recorded; prompts are scored by what was loaded last."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from aiohttp import web

from shmrl.config import RunTree, load_run
from shmrl.inference.client import RECEIVE_METHOD
from tests.support.fake_engine import FakeEngine, Oracle

MODEL = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 264,
    "max_position_embeddings": 1024,
}
RUN = """
[inference]
backend = "vllm"
urls = {urls}
max_model_len = 64
[orchestrator]
batch_size = 8
connect_timeout_s = 20.0
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
sampling = {{ top_p = 0.95, top_k = 8, max_tokens = 6 }}
[model]
path = "{path}"
"""


def run_on(directory: Path, *urls: str, config: dict[str, Any] | None = None, **flags: Any) -> RunTree:
    """A run that generates through engines at `urls`, with a model directory that the checks read.

    config: what differs in its config.json. flags: dotted keys with "__" for the dots.
    """
    (directory / "config.json").write_text(json.dumps({**MODEL, **(config or {})}))
    (directory / "run.toml").write_text(RUN.format(urls=json.dumps(urls), path=directory))
    given = {"run.output-dir": str(directory / "out"), **{k.replace("__", "."): v for k, v in flags.items()}}
    return load_run([directory / "run.toml"], given)


class FakeVllm(FakeEngine):
    """Serves an `Oracle` in the dialect of a vLLM version.

    Args:
        release: "0.30": ids as "token_id:N", no sampling masks, no weight versions in answers; "0.32": all of these.
        generate: whether there is /inference/v1/generate, or only /v1/completions.
        bad_reload: a load answers 200 and computes with weights that are neither the old nor the new ones.
        max_logprobs: what a request may ask for at most. dense: columns of layers without a router put before.
    """

    def __init__(
        self,
        oracle: Oracle | None = None,
        *,
        release: Literal["0.30", "0.32"] = "0.30",
        generate: bool = True,
        bad_reload: bool = False,
        max_logprobs: int = 64,
        dense: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(oracle, masks=release == "0.32", **options)
        self.release, self.generate, self.bad_reload = release, generate, bad_reload
        self.max_logprobs, self.dense = max_logprobs, dense
        self.label, self.scored_by = "default", 0
        self.calls: list[str] = []
        self.refuses = ""  # why it receives no weights
        self.transfers: list[tuple[Any, ...]] = []  # (host, port, path, rank, world) of every broadcast to receive

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/version", self._version)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/sleep", self._ok)
        app.router.add_post("/wake_up", self._ok)
        app.middlewares.append(self._note)
        return app

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": f"{self.release}.0"})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path_qs)
        response: web.StreamResponse = await handler(request)
        return response

    async def _generate(self, request: web.Request) -> web.Response:
        if not self.generate:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        if "/" in body.get("cache_salt", ""):
            return web.json_response({"error": {"message": "Parameter 'cache_salt' must not contain '/'"}}, status=400)
        if (asked := body["sampling_params"].get("logprobs") or 0) > self.max_logprobs:
            message = f"Requested sample logprobs of {asked}, which is greater than max allowed: {self.max_logprobs}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        return await super()._generate(request)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "prompt_logprobs" in body:
            return web.json_response({"choices": [{"prompt_logprobs": self._score(body["prompt"])}]})
        self.requests.append({"token_ids": body["prompt"], "sampling_params": body})
        choice = self.choice(body["prompt"], body)
        content = choice.pop("logprobs")["content"]
        tops = [{f"token_id:{i}": lp for i, lp in _entries(entry["top_logprobs"])} for entry in content]
        own = [entry["logprob"] for entry in content]
        choice["logprobs"] = {"tokens": [], "token_logprobs": own, "top_logprobs": tops, "text_offset": []}
        choice.pop("sampling_mask", None)
        return web.json_response({"choices": [choice]})

    def _score(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        values = self.oracle.logprobs(self.scored_by, np.array(prompt), np.arange(len(prompt))).tolist()
        rows = [{str(t): {"logprob": v, "rank": 1}} for t, v in zip(prompt, values, strict=True)]
        return [None, *rows[1:]]

    def choice(self, prompt: list[int], sampling: dict[str, Any], abort: bool = False) -> dict[str, Any]:
        choice = super().choice(prompt, sampling, abort)
        self._process(choice, len(prompt), sampling)
        if self.release == "0.30":
            for key in ("sampling_mask", "weight_versions", "stop_reason"):
                choice.pop(key)
            for entry in choice["logprobs"]["content"]:
                for each in (entry, *entry["top_logprobs"]):
                    each["token"] = f"token_id:{each.pop('token_id')}"
                    each.pop("rank")
        return choice

    def _process(self, choice: dict[str, Any], start: int, sampling: dict[str, Any]) -> None:
        """Processed log-probabilities: uniform over the oracle's kept set, -9999.0 for the rest of top_k."""
        k, top_k = sampling.get("logprobs") or 0, sampling.get("top_k") or 0
        if top_k < 1:
            return
        for i, entry in enumerate(choice["logprobs"]["content"]):
            token = entry["token_id"]
            kept = self.oracle.kept(self.version, token, start + i)
            others = [t for t in range(256) if t not in kept]
            ids = [token, *(t for t in kept if t != token), *others][:k]
            value = -math.log(len(kept))
            entry["logprob"] = value
            entry["top_logprobs"] = [
                {"token_id": t, "logprob": value if t in kept else -9999.0, "rank": 1} for t in ids
            ]

    def _routing(self, tokens: list[int], sampling: dict[str, Any]) -> str:
        if not self.dense:
            return super()._routing(tokens, sampling)
        start = sampling.get("routed_experts_prompt_start", 0)
        fed = np.array(tokens[start:-1], np.int64)
        rows = self.oracle.routing(self.version, fed, np.arange(start, start + len(fed)))
        return self.npy(np.concatenate([np.zeros((len(rows), self.dense, rows.shape[2]), rows.dtype), rows], axis=1))

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == RECEIVE_METHOD:
            host, port, _, path, *members = body["args"]
            self.transfers.append((host, int(port), path, *map(int, members)))
            answer = {"error": self.refuses} if self.refuses else {"files": [f"/received{path}"]}
            return web.json_response({"results": [answer, {}]})
        path = body["args"][0]
        self.loaded.append(path)
        if "broken" in path:
            return web.json_response({"results": [{"error": f"ValueError: {path} is cut short"}]})
        self.scored_by += self.bad_reload
        return web.json_response({"results": [{"tensors": 1, "seconds": 0.1}]})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.label = str((await request.json())["new_version"])
        return await super()._set_version(request)


def _entries(top: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [
        (int(e["token_id"] if "token_id" in e else e["token"].removeprefix("token_id:")), e["logprob"]) for e in top
    ]
