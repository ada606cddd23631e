"""The embedded engine's HTTP server: vLLM's routes over `Engine`, in the inference process.

`shmrl inference` calls `run`; by hand it is `python -m shmrl.inference.embedded.server --model DIR`. A dropped
connection aborts its request. If the engine thread dies, /health answers 500 and the process exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import random
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shmrl.errors import EngineError, PortInUse, told
from shmrl.inference.embedded.answers import Answers
from shmrl.inference.embedded.bodies import Ask, parse_chat, parse_completion, parse_generate
from shmrl.inference.embedded.engine import Engine
from shmrl.inference.embedded.model import DTYPES, Model
from shmrl.inference.embedded.params import BadRequest, Limits
from shmrl.inference.embedded.rows import Request, Row, make_rows
from shmrl.node.ports import port_in_use

log = logging.getLogger("shmrl.inference.embedded.server")
_LINE = "%(asctime)s %(levelname).1s engine %(name)s: %(message)s"
"""As every other process's (`monitor/log.py`), where this one is started by hand or by `shmrl eval`."""
LOAD_METHOD = "shmrl_load_weights"
_LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


class Server:
    """Routes and their handlers for one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        served_name: str,
        limits: Limits,
        routed_experts: bool,
        sampling_mask: bool,
        seed: int,
    ) -> None:
        self.engine, self._tokenizer, self._name, self._limits = engine, tokenizer, served_name, limits
        self._answers = Answers(served_name, tokenizer, routed_experts=routed_experts, sampling_mask=sampling_mask)
        self._seeds = random.Random(seed)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def app(self) -> web.Application:
        """The aiohttp application; run it with handler_cancellation, which is how a dropped connection aborts."""
        app = web.Application(middlewares=[_errors], client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/abort_requests", self._abort_requests),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/update_weight_version", self._update_weight_version),
                web.get("/weight_info", self._weight_info),
            ]
        )
        return app

    # ---------------------------------------------------------------------------------------------------- generating

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        ask = parse_generate(body, self._limits)
        request_id, rows = await self._run(ask, "generate-tokens")
        return web.json_response(self._answers.generate(request_id, rows))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        ask = parse_completion(body, self._limits, self._need_tokenizer())
        request_id, rows = await self._run(ask, "cmpl")
        answer = self._answers.completion(request_id, rows, ask)
        return await _stream(request, answer) if ask.stream else web.json_response(answer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        ask = parse_chat(body, self._limits, self._need_tokenizer())
        request_id, rows = await self._run(ask, "chatcmpl")
        answer = self._answers.chat(request_id, rows, ask)
        if not ask.stream:
            return web.json_response(answer)
        for choice in answer["choices"]:
            choice["delta"] = choice.pop("message")
        return await _stream(request, answer | {"object": "chat.completion.chunk"})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
        if body.get("model") not in (None, self._name):
            raise BadRequest(f"The model `{body['model']}` does not exist.", param="model", status=404)
        return body

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise BadRequest("the model directory has no tokenizer: use /inference/v1/generate")
        return self._tokenizer

    async def _run(self, ask: Ask, kind: str) -> tuple[str, list[Row]]:
        """(request id, finished rows). Cancellation, which is a dropped connection, aborts the rows."""
        if ask.params.stop:
            self._need_tokenizer()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def on_done(_: Request) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone when the server is shutting down
                loop.call_soon_threadsafe(_set, done)

        request_id = f"{kind}-{ask.request_id or uuid.uuid4().hex[:16]}"
        seed = self._seeds.getrandbits(63)
        rows = make_rows(ask.prompt, ask.params, max_model_len=self._limits.max_model_len, default_seed=seed)
        job = Request(request_id, rows, on_done)
        self.engine.submit(job)
        try:
            await done
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # nobody to abort it any more
                self.engine.abort(job)
            raise
        if job.error is not None:
            raise EngineError(f"{type(job.error).__name__}: {job.error}")
        return request_id, rows

    # ---------------------------------------------------------------------------------------------------- observing

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "shmrl",
            "root": str(self.engine.model.path),
        }
        card |= {"parent": None, "max_model_len": self._limits.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.error is None else 500)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = _prometheus(self.engine, self._name) + generate_latest(self._process).decode()
        return web.Response(text=text, content_type="text/plain")

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.version, "model_path": str(self.engine.model.path)})

    # -------------------------------------------------------------------------------------------------- controlling

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode must be abort, wait or keep, got {mode!r}", param="mode")
        await _done(self.engine.pause(mode))  # type: ignore[arg-type]
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await _done(self.engine.resume())
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.engine.paused})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        await _done(self.engine.abort())
        return web.json_response({"status": "aborted"})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """There is no prefix cache: nothing that outlives a request is keyed by tokens."""
        return web.Response()

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        method, args = body.get("method"), body.get("args") or list((body.get("kwargs") or {}).values())
        if method != LOAD_METHOD:
            raise BadRequest(f"method must be {LOAD_METHOD!r}, got {method!r}", param="method")
        if len(args) != 1 or not isinstance(args[0], str):
            raise BadRequest(f"{LOAD_METHOD} takes one directory, got {args!r}", param="args")
        await _done(self.engine.load_weights(args[0]))
        log.info("loaded weights from %s", args[0])
        return web.json_response({"results": [None]})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        version = body.get("new_version")
        if not isinstance(version, str) or not version:
            raise BadRequest(f"new_version must be a non-empty string, got {version!r}", param="new_version")
        await _done(self.engine.set_version(version))
        return web.json_response({"weight_version": version})


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _wake(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)


async def _done(future: Future[Any]) -> None:
    await asyncio.wrap_future(future)


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Exceptions as vLLM's error bodies."""
    try:
        return await handler(request)
    except BadRequest as error:
        kind = "NotFoundError" if error.status == 404 else "BadRequestError"
        return _error(str(error), kind, error.param, error.status)
    except web.HTTPException as error:
        return _error(error.reason, "NotFoundError" if error.status == 404 else "BadRequestError", None, error.status)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _error(str(error) or type(error).__name__, "InternalServerError", None, 500)


def _error(message: str, kind: str, param: str | None, code: int) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=code)


async def _stream(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The whole answer as one server-sent event: enough for clients that insist on `stream`. No arrays, as in vLLM."""
    for choice in answer["choices"]:
        choice.pop("routed_experts")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response


def _prometheus(engine: Engine, model: str) -> str:
    """Prometheus text with vLLM's names."""
    stats = engine.stats()
    label = f'engine="0",model_name="{model}"'
    samples: list[tuple[str, str, str, float]] = [
        ("vllm:num_requests_running", "gauge", label, stats.running),
        ("vllm:num_requests_waiting", "gauge", label, stats.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", label, stats.kv_usage),
        ("vllm:prompt_tokens_total", "counter", label, stats.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", label, stats.generation_tokens),
    ]
    for reason, count in sorted(stats.finished.items()):
        samples.append(("vllm:request_success_total", "counter", f'{label},finished_reason="{reason}"', count))
    lines, seen = [], set()
    for name, kind, labels, value in samples:
        if name not in seen:
            lines.append(f"# TYPE {name.removesuffix('_total')} {kind}")
            seen.add(name)
        lines.append(f"{name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------- the process


def run(
    model_dir: str | Path,
    host: str,
    port: int,
    *,
    served_name: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_logprobs: int = 20,
    logprobs_mode: str = "processed_logprobs",
    return_routed_experts: bool = True,
    return_sampling_mask: bool = True,
    seed: int = 0,
    publish: Callable[[str], object] | None = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT: SystemExit(143) or (130); SystemExit(1) when the engine thread dies.

    publish: is told the server's url once its port is known, before the model is loaded.
    served_name defaults to the directory's name, max_model_len to what the checkpoint allows. Raises PortInUse before
    anything is loaded, EngineError when the model cannot be served.
    """
    with bind(host, port) as listener:
        if publish is not None:
            publish(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        if logprobs_mode not in _LOGPROBS_MODES:
            raise EngineError(f"logprobs_mode must be one of {', '.join(_LOGPROBS_MODES)}, got {logprobs_mode!r}")
        model = Model(model_dir, dtype=dtype, device=device)
        longest = max_model_len or model.max_positions
        if longest > model.max_positions:
            raise EngineError(f"max_model_len = {longest}, but {model_dir} allows {model.max_positions} positions")
        tokenizer = _tokenizer(Path(model_dir))
        engine = Engine(
            model,
            tokenizer and tokenizer.backend_tokenizer,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            raw_logprobs=logprobs_mode == "raw_logprobs",
        )
        server = Server(
            engine,
            tokenizer,
            served_name=served_name or Path(model_dir).name,
            limits=Limits(vocab=model.vocab, max_model_len=longest, max_logprobs=max_logprobs),
            routed_experts=return_routed_experts,
            sampling_mask=return_sampling_mask,
            seed=seed,
        )
        number = asyncio.run(_serve(server, listener))
    if engine.error is not None:
        raise SystemExit(1)
    if number:
        raise SystemExit(128 + number)


async def _serve(server: Server, listener: socket.socket) -> int:
    """Until a signal or the engine's death; the number of the first signal, or 0."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    server.engine.on_death = lambda: _wake(loop, stop)
    if server.engine.error is not None:
        stop.set()
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=2)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=1024).start()
    log.info("serving %s on port %d", server.engine.model.path, listener.getsockname()[1])
    await stop.wait()
    if server.engine.error is None:
        server.engine.close()
    await runner.cleanup()
    return received[0] if received else 0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet; PortInUse names who listens there where that can be read."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise port_in_use(port, "inference") from None
        raise PortInUse(f"inference: cannot bind {host}:{port}: {error.strerror}") from None
    return listener


def _tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def main(argv: list[str] | None = None) -> None:
    """The command line; flags are named as vLLM's where it has them."""
    parser = argparse.ArgumentParser(prog="python -m shmrl.inference.embedded.server", description=__doc__)
    parser.add_argument("--model", dest="model_dir", required=True, type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default=8000, type=int)
    parser.add_argument("--served-model-name", dest="served_name")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", default=64, type=int)
    parser.add_argument("--max-logprobs", default=20, type=int)
    parser.add_argument("--logprobs-mode", default="processed_logprobs", choices=_LOGPROBS_MODES)
    parser.add_argument("--seed", default=0, type=int)
    options = vars(parser.parse_args(argv))
    logging.basicConfig(level=logging.INFO, format=_LINE, datefmt="%H:%M:%S")
    try:
        run(options.pop("model_dir"), options.pop("host"), options.pop("port"), **options)
    except (PortInUse, EngineError) as error:
        sys.exit(f"shmrl: error: {told(error)}")


if __name__ == "__main__":
    main()
