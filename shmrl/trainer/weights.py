"""Writes the policy's weights where engines read them: a Hugging Face directory that appears at once, complete.

The public layout is what transformers' own save_pretrained writes (one tensor per expert projection), so vLLM,
transformers and the embedded engine load it alike. Called on rank 0 after every step, and by `checkpoint`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from shmrl.config import RunTree
from shmrl.errors import RunError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)(\.index\.json)?$")
_NOTES = {"STABLE", "tiny.json", "trainer.json", "orchestrator.json"}


def write_model(
    lm: Any, state: dict[str, Tensor], source: Path, target: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Weights and config of `lm` with the values of `state` (live names), plus tokenizer files from `source`.

    Parameters are written as `dtype`; buffers (DeepSeek's correction bias) stay as they are.
    """
    parameters = {name for name, _ in lm.named_parameters()}
    cast = {name: value.to(dtype) if name in parameters else value for name, value in state.items()}
    lm.save_pretrained(target, state_dict=cast)
    config = json.loads((target / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")  # what save_pretrained says is the live model's
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in source.iterdir():
        if (
            file.is_file()
            and not (target / file.name).exists()
            and not _WEIGHTS.match(file.name)
            and file.name not in _NOTES
        ):
            shutil.copyfile(file, target / file.name)


def stored_dtype(source: Path) -> torch.dtype:
    """What the checkpoint in `source` says its weights are: engines expect new versions in the same; else float32."""
    config = json.loads((source / "config.json").read_text())
    config = config.get("text_config", config)
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")  # type: ignore[no-any-return]


def publish(tree: RunTree, version: int, lm: Any, state: dict[str, Tensor], source: Path) -> Path:
    """Write this version's directory; one that is there keeps its other files and gets the new weights.

    They have the dtype of the model in `source`, where training started; checkpoints are float32.

    Readers see either the old files or the new ones, never a part of one.
    """
    target = tree.published_dir(version)
    with staging(target) as work:
        write_model(lm, state, source, work, stored_dtype(source))
        if target.exists():
            for file in sorted(work.glob("*.safetensors*")):
                os.replace(file, target / file.name)
            shutil.rmtree(work)
        else:
            os.rename(work, target)
    return target


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A directory beside `target` to be filled and renamed; removed when that fails. RunError says how much is free."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        work.chmod(0o755)
        yield work
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of them
        shutil.rmtree(work, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        raise RunError(f"{target} cannot be written, {free:,} B are free: {type(error).__name__}: {error}") from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def prune(tree: RunTree, newest: int) -> None:
    """Remove old versions; the `trainer.keep_weights` newest stay, those of a checkpoint, and 0 with its tokenizer.

    In shared memory, which is dear, only the newest stays.
    """
    shared = tree.shared_weights
    if shared is not None:
        for version in steps_in(shared):
            if version < newest:
                shutil.rmtree(tree.published_dir(version), ignore_errors=True)
        return
    kept = {0, *range(newest - tree.trainer.keep_weights + 1, newest + 1)}
    kept |= set(steps_in(tree.run.output_dir / "checkpoints"))
    for version in steps_in(tree.run.output_dir / "weights"):
        if version not in kept and version < newest:
            shutil.rmtree(tree.weights_dir(version), ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """n of every `step_<n>` directory in `folder`, ascending; empty when there is no folder."""
    found = (re.fullmatch(r"step_(\d+)", entry.name) for entry in folder.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)
