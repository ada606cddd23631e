"""Env ids resolve without importing the environment; what is wrong with one is said in a sentence."""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location
from unittest.mock import ANY

import pytest

from shmrl.env.interface import Episode, SessionRollout
from shmrl.envs.registry import BUNDLED, find, load
from shmrl.errors import ConfigError
from tests.env.sessions.test_remote import Scripted


def test_bundled_names_and_modules_are_found_without_import():
    for name in BUNDLED:
        assert find(name) is None
    sys.modules.pop("tests.env.environments", None)
    assert find("tests.env.environments:Echo") is None
    assert "tests.env.environments" not in sys.modules


def test_a_file_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    assert find("my_env:Thing") is None


def test_what_only_a_finder_knows_is_found_without_import_too(tmp_path, monkeypatch):
    """An editable install may be on no path."""
    package = tmp_path / "source" / "deep"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "mine.py"):
        file.write_text("raise SystemExit('imported')\n")

    class Editable(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            place = package.parent / "__init__.py"
            return spec_from_file_location(name, place) if name == "only_the_finder_knows" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    assert find("only_the_finder_knows:Thing") is None
    assert find("only_the_finder_knows.deep.mine:Thing") is None
    assert "there is no module" in find("only_the_finder_knows.deep.yours:Thing")


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("revers-text", "did you mean reverse-text?"),
        ("gsm8k", "bundled are reverse-text, alphabet-sort, guess-number"),
        ("no_such_module:Thing", "there is no module 'no_such_module'"),
        ("shmrl.envs.nothing:Thing", "there is no module 'shmrl.envs.nothing'"),
        ("a b:c", "is not module:attribute"),
    ],
)
def test_problems_are_said(env_id, said):
    assert said in find(env_id)
    with pytest.raises(ConfigError):
        load(env_id, {})


def test_load_constructs_with_the_arguments():
    assert load("reverse-text", {"max_length": 5}).lengths == (4, 5)
    assert isinstance(load("guess-number", {"seed": 2}), SessionRollout)
    assert load("guess-number", {"seed": 2}).seed == 2


def test_load_refuses_what_is_no_environment():
    with pytest.raises(ConfigError, match=r"env\.args: got an unexpected keyword argument 'colour'"):
        load("reverse-text", {"colour": 1})
    with pytest.raises(ConfigError, match="has no callable 'Nothing'"):
        load("tests.env.environments:Nothing", {})
    with pytest.raises(ConfigError, match="Counter is no environment"):
        load("collections:Counter", {})
    with pytest.raises(ValueError, match="min_length = 9, max_length = 8"):
        load("reverse-text", {"min_length": 9})


def test_openenv_names_servers_or_changes_nothing():
    assert find("openenv:http://somewhere:8000,https://elsewhere/env") is None
    assert find("openenv:guess-number") is None
    assert "did you mean guess-number?" in find("openenv:gues-number")
    assert isinstance(load("openenv:guess-number", {}), SessionRollout)
    remote = load("openenv:http://a:8000,http://b:8000", {"timeout_s": 5})
    assert (remote.urls, remote.timeout_s) == (["http://a:8000", "http://b:8000"], 5)
    with pytest.raises(ConfigError, match="timeout_sec"):
        load("openenv:http://a:8000", {"timeout_sec": 5})


async def test_a_session_with_typed_actions_is_a_rollout_too():
    """An OpenEnv environment in our own loop: the reply is its action's message."""
    environment = load("tests.env.sessions.environments:OpenEcho", {})
    assert await environment.rollout(environment.tasks("train")[0], Scripted("a", "bb", "ccc")) == Episode(
        6.0,
        {"steps": 6.0},
        {"turns": 3.0},
        "done",
        [
            {"role": "user", "content": ANY},
            *(
                {"role": role, "content": content}
                for text in ("a", "bb", "ccc")
                for role, content in (("assistant", text), ("user", ANY))
            ),
        ],
    )
