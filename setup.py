"""Builds the C core and its bindings. Everything declarative is in pyproject.toml.

SHMRL_SANITIZE=address|undefined|thread builds with that gcc sanitizer and frame pointers (run Python with
LD_PRELOAD=$(gcc -print-file-name=libasan.so) for ASan); several with commas. SHMRL_CRASH_POINTS=1 builds for
tests/arena/crashes.py: the process dies where it was told to. SHMRL_FULL_API=1 builds for this interpreter alone
instead of the limited API (abi3, CPython >= 3.11).
"""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ABI3 = not os.environ.get("SHMRL_FULL_API")
SANITIZER = os.environ.get("SHMRL_SANITIZE")
CRASH_POINTS = os.environ.get("SHMRL_CRASH_POINTS")

compile_args = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fno-strict-aliasing"]
link_args: list[str] = []
if SANITIZER:
    compile_args += [f"-fsanitize={SANITIZER}", "-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    link_args += [f"-fsanitize={SANITIZER}"]

macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)]
if ABI3:
    macros.append(("Py_LIMITED_API", "0x030B0000"))
if CRASH_POINTS:
    compile_args += ["-O0"]
    macros.append(("SRL_CRASH_POINTS", None))


def extension(name: str, pyx: str, sources: list[str]) -> Extension:
    """One binding, compiled together with the C files it calls."""
    return Extension(
        name,
        [pyx, *sources],
        include_dirs=["csrc"],
        depends=[str(path) for path in Path("csrc").glob("*.h")],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        define_macros=macros,
        py_limited_api=ABI3,
    )


BYTES = ["csrc/avx512.c", "csrc/copy.c", "csrc/crc32c.c", "csrc/parts.c"]
ARENA = [str(path) for path in sorted(Path("csrc").glob("arena_*.c"))] + BYTES
if CRASH_POINTS:
    ARENA.append("tests/arena/crash_points.c")
ANSWERS = ["csrc/payload_answers.c", "csrc/payload_json.c"]
PAYLOAD = [str(path) for path in sorted(Path("csrc").glob("payload_*.c")) if str(path) not in ANSWERS]
PAYLOAD += BYTES

setup(
    ext_modules=cythonize(
        [
            extension("shmrl.arena._arena", "shmrl/arena/_arena.pyx", ARENA),
            extension("shmrl.arena._ctl", "shmrl/arena/_ctl.pyx", ARENA),
            extension("shmrl.arena._dlpack", "shmrl/arena/_dlpack.pyx", []),
            extension("shmrl.payload._payload", "shmrl/payload/_payload.pyx", PAYLOAD),
            extension("shmrl.payload._answers", "shmrl/payload/_answers.pyx", ANSWERS),
        ],
        language_level=3,
    ),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},
)
