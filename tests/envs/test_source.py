"""What a module's source says about a callable: wrong names and arguments, and nothing that cannot be told."""

import pytest

from shmrl.envs.source import faults

MODULE = """
import functools
from elsewhere import Base

class Game:
    def __init__(self, high, low=1, *, seed=0): ...

class Child(Game):
    pass

class Foreign(Base):
    pass

class Open(Game):
    def __init__(self, **args): ...

class Bare:
    pass

@functools.cache
def decorated(): ...

def factory(size): ...

if True:
    Alias = Game
"""


@pytest.fixture
def ask(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(MODULE)
    return lambda attribute, **args: [line.replace(str(path), "FILE") for line in faults(path, attribute, args)]


@pytest.mark.parametrize(
    ("attribute", "args", "says"),
    [
        ("Gane", {}, ["FILE has no 'Gane'; did you mean Game?"]),
        ("Game", {"high": 9, "sead": 1}, ["env.args.sead: Game has no such argument; did you mean seed?"]),
        ("Game", {"low": 1}, ["env.args.high: Game needs it"]),
        ("Child", {"x": 1, "high": 2}, ["env.args.x: Child has no such argument; it takes high, low, seed"]),
        ("Bare", {"x": 1}, ["env.args.x: Bare has no such argument; it takes none"]),
        ("factory", {}, ["env.args.size: factory needs it"]),
    ],
)
def test_what_is_wrong_is_said(ask, attribute, args, says):
    assert ask(attribute, **args) == says


@pytest.mark.parametrize("attribute", ["Foreign", "Open", "decorated", "Alias", "functools", "Base", "Game.inner"])
def test_what_cannot_be_told_is_not_said(ask, attribute):
    assert ask(attribute, x=1) == []


def test_a_module_that_is_no_python_is_named_and_a_star_hides_names(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    (line,) = faults(tmp_path / "broken.py", "f", {})
    assert line == f"{tmp_path}/broken.py, line 1: invalid syntax"
    (tmp_path / "star.py").write_text("from games import *\n")
    assert faults(tmp_path / "star.py", "anything", {}) == []
