"""What shmrl adds to a vLLM worker: new weights without a restart. Runs in vLLM's worker processes, by collective_rpc.

vLLM's interpreter may be another Python, so this file imports nothing of shmrl, and torch and vllm only when it is
called; its directory is put on that interpreter's PYTHONPATH. An engine that somebody else starts needs the same two:

    PYTHONPATH=.../shmrl/inference/vllm/plugin  vllm ... --worker-extension-cls shmrl_vllm_worker.ShmrlWorker

A failed call answers {"error": text}, with the weights as they were before: an exception in a worker would end some
versions of the engine.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

Header = dict[str, tuple[str, tuple[int, ...]]]


class ShmrlWorker:
    """Mixed into vLLM's Worker by --worker-extension-cls; the first four attributes are the worker's."""

    model_runner: Any
    vllm_config: Any
    rank: int
    local_rank: int
    _shmrl_loaded: list[Path] | None = None  # what was loaded whole last
    _shmrl_received: Mapping[Path, int] = MappingProxyType({})  # files in this worker's memory, and their descriptors

    def shmrl_load_weights(self, *paths: str) -> dict[str, Any]:
        """Load *.safetensors (Hugging Face names), or every one of a checkpoint directory, mapped, not read.

        Refused before anything changes if a name, type or shape is not the served checkpoint's, or a file is cut short.
        """
        return self._shmrl_guarded(lambda: self._shmrl_load([Path(path) for path in paths]))

    def shmrl_receive_weights(
        self, host: str, port: str, name: str, path: str, rank: str, world: str
    ) -> dict[str, Any]:
        """Receive the files of a directory on trainer rank 0's machine, as member `rank` of transfer `name`.

        The first worker's part; it answers {"files": [path]}, which every worker of this engine can load.
        """
        return self._shmrl_guarded(lambda: self._shmrl_receive(host, int(port), name, path, int(rank), int(world)))

    # ----------------------------------------------------------------------------------------------------------- load

    def _shmrl_guarded(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return {**work(), "seconds": time.perf_counter() - began}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _shmrl_load(self, paths: list[Path]) -> dict[str, Any]:
        header = read_headers(paths)
        served = Path(self.vllm_config.model_config.model)
        if served.is_dir():
            check_same(header, read_headers([served]), paths[0])
        try:
            self._shmrl_reload(read_tensors(paths))
        except Exception as error:
            before = self._shmrl_loaded or [served]
            try:
                read_headers(before)  # it may be gone by now, and nothing at all must not pass for weights
                self._shmrl_reload(read_tensors(before))
            except Exception as worse:
                raise RuntimeError(
                    f"{error}; the weights of {before[0]} did not come back either ({worse}): stop this engine"
                ) from worse
            raise
        self._shmrl_loaded = paths
        return {"tensors": len(header)}

    def _shmrl_receive(self, host: str, port: int, name: str, path: str, rank: int, world: int) -> dict[str, Any]:
        if self.local_rank != self.rank or self.vllm_config.parallel_config.data_parallel_size > 1:
            raise ValueError(
                "a broadcast reaches engines on one machine without data parallelism: start one per replica"
            )
        if self.rank:
            return {}
        import shmrl_broadcast  # type: ignore[import-not-found]  # beside this file

        for file in self._shmrl_received.keys() - set(self._shmrl_loaded or ()):
            os.close(self._shmrl_received[file])
        kept = {file: fd for file, fd in self._shmrl_received.items() if file in (self._shmrl_loaded or ())}
        self._shmrl_received = kept
        arrived = shmrl_broadcast.receive(host, port, name, path, rank, world, self.model_runner.device)
        files = {Path(f"/proc/{os.getpid()}/fd/{descriptor}"): descriptor for descriptor in arrived}
        self._shmrl_received = {**kept, **files}
        return {"files": [str(file) for file in files]}

    def _shmrl_reload(self, weights: Iterable[tuple[str, Any]]) -> None:
        from vllm.config import set_current_vllm_config

        for module in self.model_runner.get_model().modules():
            # With a kernel in place vLLM does not pack an unquantized MoE's experts again after a reload, and computes
            # with raw weights in the packed layout, silently (seen in 0.30.0 and 0.32.0 on CPU).
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None and hasattr(module, "w13_weight"):
                method.moe_kernel = None
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=weights)


# ------------------------------------------------------------------------------------------------- files of tensors


def read_headers(paths: Iterable[Path]) -> Header:
    """{name: (dtype, shape)} of every tensor in files, or in directories of them; ValueError where one is not whole."""
    found: Header = {}
    for path in paths:
        files = _files(path)
        if not files:
            raise ValueError(f"{path} has no *.safetensors")
        for file in files:
            found.update(_read_header(file))
    return found


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _read_header(file: Path) -> Header:
    with file.open("rb") as stream:
        raw = stream.read(8)
        size = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
        total = os.fstat(stream.fileno()).st_size
        text = stream.read(min(size, total))
    if not size or 8 + size > total:
        raise ValueError(f"{file} is cut short: {total} bytes")
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    end = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end > total:
        raise ValueError(f"{file} is cut short: {total:,} of {end:,} bytes")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def check_same(given: Header, served: Header, source: Any) -> None:
    """ValueError unless both have the same names and shapes (types may differ: vLLM casts)."""
    missing, unknown = sorted(served.keys() - given.keys()), sorted(given.keys() - served.keys())
    if missing or unknown:
        raise ValueError(
            f"{source} lacks {len(missing)} tensors {missing[:3]} and has {len(unknown)} unknown ones {unknown[:3]}"
        )
    for name, (_, shape) in given.items():
        if shape != served[name][1]:
            raise ValueError(f"{source}: {name} has shape {list(shape)}, served is {list(served[name][1])}")


def read_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every file, mapped."""
    from safetensors import safe_open

    for file in (file for path in paths for file in _files(path)):
        with safe_open(str(file), "pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_tensor(name)
