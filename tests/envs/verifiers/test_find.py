"""Ids of verifiers are looked up without importing it: the package's version, and the environment's module."""

import sys

import pytest

from shmrl.envs.registry import find, load, misused
from shmrl.errors import ConfigError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed("0.4.0"): as if this interpreter had that version, and the packages of two environments."""

    def make(version):
        (tmp_path / f"verifiers-{version}.dist-info").mkdir()
        (tmp_path / f"verifiers-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
        )
        for name in ("reverse_text.py", "verifiers/v1/tasksets/harbor.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("raise SystemExit('imported')\n")
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_without_verifiers_it_says_which_one_and_where():
    assert find("verifiers:reverse-text") == (
        f"env id 'verifiers:reverse-text': a taskset of v1 needs verifiers, which {sys.executable} does not have: "
        "pip install 'verifiers>=0.4' in an interpreter of its own, named by serve.python"
    )
    with pytest.raises(ConfigError, match=r"a \[legacy\] environment needs verifiers, .*'verifiers<0.2'"):
        load("legacy:reverse-text", {})


@pytest.mark.parametrize(
    ("version", "good", "bad"),
    [
        (
            "0.4.0",
            ["verifiers:reverse-text", "verifiers:prime/Reverse-Text@1.2", "verifiers:harbor"],
            "legacy:reverse-text",
        ),
        ("0.1.14", ["legacy:reverse-text", "legacy:prime/reverse-text"], "verifiers:reverse-text"),
    ],
)
def test_each_kind_has_its_version(installed, version, good, bad):
    installed(version)
    assert [find(env_id) for env_id in good] == [None] * len(good)
    assert f"and {sys.executable} has {version}: install that one" in find(bad)


def test_a_module_that_is_not_there_or_cannot_be(installed):
    installed("0.4.0")
    assert f"{sys.executable} finds no module 'reverse_texts': install the environment's package" in find(
        "verifiers:reverse-texts"
    )
    for name in ("", "a b", "a.b", "1a"):
        assert f"{name!r} is the name of no package" in find(f"verifiers:{name}")


def test_arguments_of_load_environment_are_checked_by_its_source(installed, tmp_path):
    installed("0.1.14")
    (tmp_path / "reverse_text.py").write_text("def load_environment(seed: int = 0, *, size):\n    raise SystemExit\n")
    assert misused("legacy:reverse-text", {"sed": 1}) == [
        "legacy.args.sed: load_environment has no such argument; did you mean seed?",
        "legacy.args.size: load_environment needs it",
    ]
    assert misused("verifiers:reverse-text", {"anything": 1}) == []  # a table, validated in the worker
