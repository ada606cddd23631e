"""Where an environment's own code raised: the innermost frame that is neither shmrl's nor a library's.

Called in the env worker, the one process that has the traceback; the answer travels as `ErrorInfo.where`.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from dataclasses import replace
from pathlib import Path

from shmrl.errors import ShmrlError, told
from shmrl.types import ErrorInfo

MESSAGE = 16384
"""Characters of why an environment cannot load that travel."""
_SHMRL = str(Path(__file__).parents[1]) + os.sep
_BUNDLED = _SHMRL + "envs" + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def failure(error: BaseException) -> ErrorInfo:
    """The record of what an environment raised. What shmrl raised says all by itself."""
    info = ErrorInfo.of(error)
    return info if isinstance(error, ShmrlError) else replace(info, where=where(error))


def unloadable(env_id: str, error: BaseException) -> str:
    """Example: "my_env:Mine: RuntimeError: no data (my_env.py:23, in __init__)" """
    text = told(error) if isinstance(error, ShmrlError) else str(failure(error))
    return f"{env_id}: {text}"[:MESSAGE].encode("utf-8", "replace").decode()


def where(error: BaseException) -> str:
    """Example: "my_env.py:23, in rollout". Of an installed environment its first frame; "" if it has none."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not _is_shmrl(one.filename)]
    own = [one for one in frames if not one.filename.startswith((*_LIBRARIES, "<"))]
    installed = [one for one in frames if f"{os.sep}site-packages{os.sep}" in one.filename]
    if not own and not installed:
        return ""
    frame = own[-1] if own else installed[0]
    return f"{_short(frame.filename)}:{frame.lineno}, in {frame.name}"


def _is_shmrl(filename: str) -> bool:
    return filename.startswith(_SHMRL) and not filename.startswith(_BUNDLED)


def _short(filename: str) -> str:
    """Relative to the working directory, for what is below it."""
    return filename.removeprefix(os.getcwd() + os.sep)
