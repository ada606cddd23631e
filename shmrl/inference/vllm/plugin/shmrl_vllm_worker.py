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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Header = dict[str, tuple[str, tuple[int, ...]]]


class ShmrlWorker:
    """Mixed into vLLM's Worker by --worker-extension-cls; `model_runner` and `vllm_config` are the worker's."""

    model_runner: Any
    vllm_config: Any
    _shmrl_loaded: Path | None = None  # the last directory that was loaded whole

    def shmrl_load_weights(self, path: str) -> dict[str, Any]:
        """Load every *.safetensors of a checkpoint directory (Hugging Face names), mapped, not read.

        Refused before anything changes if a name, type or shape is not the served checkpoint's, or a file is cut short.
        """
        return self._shmrl_guarded(lambda: self._shmrl_load(Path(path)))

    # ----------------------------------------------------------------------------------------------------------- load

    def _shmrl_guarded(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            return {**work(), "seconds": time.perf_counter() - began}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _shmrl_load(self, directory: Path) -> dict[str, Any]:
        header = read_headers(directory)
        served = Path(self.vllm_config.model_config.model)
        if served.is_dir():
            check_same(header, read_headers(served), directory)
        try:
            self._shmrl_reload(read_tensors(directory))
        except Exception as error:
            before = self._shmrl_loaded or served
            try:
                read_headers(before)  # it may be gone by now, and nothing at all must not pass for weights
                self._shmrl_reload(read_tensors(before))
            except Exception as worse:
                raise RuntimeError(
                    f"{error}; the weights of {before} did not come back either ({worse}): stop this engine"
                ) from worse
            raise
        self._shmrl_loaded = directory
        return {"tensors": len(header)}

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


def read_headers(directory: Path) -> Header:
    """{name: (dtype, shape)} of every tensor in a directory; ValueError where a file is not whole."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors")
    found: Header = {}
    for file in files:
        found.update(_read_header(file))
    return found


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


def read_tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every file, mapped."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), "pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                yield name, tensors.get_tensor(name)
