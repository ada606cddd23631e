"""GEM's environments by id and by factory: sessions of shmrl, used again, and programs that run in its sandbox."""

import sys
from pathlib import Path

import pytest

from shmrl.env import sandbox
from shmrl.env.interface import SessionRollout, Step
from shmrl.envs.registry import find, load
from shmrl.errors import ConfigError

FAKE = Path(__file__).parents[1] / "support/fake_gem"


@pytest.fixture
def gem(monkeypatch):
    """The fake package in the place of the real one, imported anew."""
    monkeypatch.syspath_prepend(FAKE)
    import gem

    yield gem
    for name in [name for name in sys.modules if name.partition(".")[0] == "gem"]:
        del sys.modules[name]
    sandbox.use(None)


@pytest.mark.parametrize(
    ("env_id", "args"),
    [
        ("gem:game:Dice-v0", {"sides": 9}),
        ("gem:make", {"env_id": "game:Dice-v0", "sides": 9}),
        ("gem:Dice", {"sides": 9}),
    ],
)
def test_by_id_by_factory_and_by_class_it_is_a_session(gem, env_id, args):
    environment = load(env_id, args)
    assert isinstance(environment, SessionRollout)
    session = environment.make()
    first = session.reset(1 << 40).text
    assert first == environment.make().reset(1 << 40).text
    assert first.startswith("9 sides, ")
    assert session.step("0") == Step("seen", 0.0)
    assert session.step(first.split()[-1]) == Step("seen", 1.0, done=True, truncated=True)


def test_a_factory_of_ones_own_may_return_one(gem, tmp_path, monkeypatch):
    (tmp_path / "my_gem.py").write_text("import gem\ndef build(sides): return gem.make('game:Dice-v0', sides=sides)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("my_gem:build", {"sides": 3}).make().reset(0).text.startswith("3 sides")


def test_environments_are_used_again_after_their_episode(gem):
    environment = load("gem:game:Dice-v0", {})
    before = len(gem.built)
    one, other = environment.make(), environment.make()
    for session in (one, other):
        session.reset(0)
    assert len(gem.built) == before + 1  # the first was there
    one.close()
    environment.make().reset(0)
    assert len(gem.built) == before + 1


def test_its_programs_run_in_shmrls_sandbox(gem, box):
    session = load("gem:make", {"env_id": "code:Double", "sandbox_type": "bwrap"}).make()
    session.reset(0)
    assert session.step("print(2 * int(input()))").reward == 1.0
    assert "MemoryError\nended by the limit memory" in session.step("bytearray(10 << 30)").observation
    seen = session.step("import os; print(os.getpid(), os.listdir('/dev/shm'), file=__import__('sys').stderr)")
    assert seen.observation == "2 []"


def test_without_the_argument_gems_own_way_stays(gem):
    session = load("gem:code:Double", {}).make()
    session.reset(0)
    assert session.step("").reward == 0.0
    assert not sandbox._current


def test_its_sandbox_without_bwrap_is_refused(gem, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install -y bubblewrap"):
        load("gem:code:Double", {"sandbox_type": "bwrap"})


def test_without_gem_the_id_is_refused_with_what_installs_it():
    assert find("gem:game:Dice-v0") == "env id 'gem:game:Dice-v0': GEM is not installed: pip install gem-llm"
    with pytest.raises(ConfigError, match="pip install gem-llm"):
        load("gem:game:Dice-v0", {})
