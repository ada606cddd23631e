"""Env workers under another interpreter (`serve.python`): how shmrl gets there, and what must be there already.

An environment may need packages, or a Python, that the server's own interpreter does not have. Its workers then run
under the environment's interpreter and load shmrl from the directory of this very installation: both ends of a link are
one version, and nothing else of the server's packages is seen there. The extensions are of the limited API: one file
serves CPython 3.11 and later. The libraries a worker imports (NEEDED) are the environment's own; `problems` says which
are missing before anything starts. Called by the launcher's preflight and by the env server; imports no environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROBE_S = 10.0
"""How long an interpreter has to say whether it finds an environment."""
PACKAGE = Path(__file__).parents[1]
NEEDED = {
    "aiohttp": "aiohttp>=3.10",
    "jinja2": "jinja2>=3.1",
    "msgpack": "msgpack>=1.0.7",
    "numpy": "numpy>=1.26",
    "posix_ipc": "posix_ipc>=1.2",
    "psutil": "psutil>=5.9",
    "pydantic": "pydantic>=2.9",
    "setproctitle": "setproctitle>=1.3",
    "tokenizers": "tokenizers>=0.21",
    "tomli_w": "tomli_w>=1.0",
    "zmq": "pyzmq>=26",
}
"""Modules that a worker imports, and how to ask pip for them: a part of shmrl's own dependencies."""

_BOOT = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d, and shmrl needs 3.11 or later" % sys.version_info[:2])
import importlib.util, runpy
root, module = sys.argv[1:3]
spec = importlib.util.spec_from_file_location("shmrl", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["shmrl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["shmrl"])
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def command(python: str | Path | None, module: str) -> list[str]:
    """The command line that runs a module of shmrl: with this interpreter, or with another one."""
    if python is None:
        return [sys.executable, "-m", module]
    return [str(python), "-c", _BOOT, str(PACKAGE), module]


def problems(asked: Sequence[tuple[Path, str, Mapping[str, Any]]], timeout_s: float = PROBE_S) -> list[Sequence[str]]:
    """What keeps workers of each (interpreter, env id, its arguments) from running it, in sentences.

    All are asked at once, those that are alike together.
    """
    keys = [(python, env_id, json.dumps(args, default=str, sort_keys=True)) for python, env_id, args in asked]
    different = list(dict.fromkeys(keys))
    with ThreadPoolExecutor(max(1, len(different))) as pool:
        found = dict(zip(different, pool.map(lambda key: _asked(key, timeout_s), different), strict=True))
    return [found[key] for key in keys]


def _asked(key: tuple[Path, str, str], timeout_s: float) -> Sequence[str]:
    python, env_id, args = key
    named = f"serve.python = {str(python)!r}"
    order = [*command(python, __name__), env_id, args]
    try:
        done = subprocess.run(order, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return [f"{named} did not answer within {timeout_s:g} s"]
    except OSError as error:
        return [f"{named} does not run: {error.strerror}"]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it exits with {done.returncode}"])[-1]
        return [f"{named} does not work: {last}"]
    last = (done.stdout.splitlines() or [""])[-1]
    try:
        answer = json.loads(last)
        missing, wrong = answer["missing"], answer["wrong"]
    except (ValueError, TypeError, KeyError):
        return [f"{named} does not work: it answered {last[:200]!r}"]
    if missing:
        install = " ".join(f"'{name}'" for name in missing)
        return [f"{named} lacks what a worker needs: {python} -m pip install {install}"]
    return [f"{named}: {one}" for one in wrong]


def main(env_id: str, args: str) -> None:
    """In the other interpreter: one line of JSON about it."""
    missing = [asked for name, asked in NEEDED.items() if find_spec(name) is None]
    wrong: list[str] = []
    if not missing:
        registry = import_module("shmrl.envs.registry")  # environments stand above this room: they are met by name only
        found = registry.find(env_id)
        wrong = registry.misused(env_id, json.loads(args)) if found is None else [found]
    print(json.dumps({"missing": missing, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
