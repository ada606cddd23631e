"""One list of server types, and everything that asks it: a type that leaves the list leaves all of them."""

import pytest
from pydantic import ValidationError

from shmrl.config import Log
from shmrl.config.gym import SERVER_TYPES, Reference
from shmrl.config.nesting import Instance, Nesting, read_nesting
from shmrl.env.episodes.plan import Plan
from shmrl.env.episodes.server import EpisodeHost
from shmrl.env.episodes.telemetry import Telemetry
from shmrl.env.episodes.wire import Failure
from shmrl.errors import ConfigError

GONE = (ValidationError, ConfigError, KeyError, AssertionError)


def server(kind):
    return Instance("one", kind, "some", {"entrypoint": "app.py", "host": "127.0.0.1", "port": 7001}, "gym.yaml:1")


def config(kind, written):
    """A reference names it."""
    assert Reference.model_validate({"type": kind, "name": "one"}).type == kind


def discovery(kind, written):
    """A file declares an instance of it."""
    nesting = read_nesting([written({"one": {kind: {"some": server(kind).block}}})])
    assert nesting.instances["one"].type == kind


def startup(kind, written):
    """It is known who starts its instances: environment servers are started here."""
    assert server(kind).hosted == (kind == "environment_servers")


def address(kind, written):
    """A reference leads to its host and port."""
    nesting = Nesting({"one": server(kind)})
    assert nesting.url(Reference.model_construct(type=kind, name="one")) == "http://127.0.0.1:7001"


def status(kind, written):
    """The head lists it under its type."""
    host = EpisodeHost(Plan(Nesting({"one": server(kind)}), (), None, Log()))
    assert host.status(server(kind))["server_type"] == kind


def telemetry(kind, written):
    """Its counts carry its type."""
    counts = Telemetry()
    with counts.of(server(kind)).episode() as seen:
        seen.ended(Failure.of("no", terminal=True, stage="seed"))
    line = f'shmrl_episodes_total{{outcome="failure",server="one",server_type="{kind}",stage="seed"}} 1.0'
    assert line in counts.page().decode()


ASKERS = (config, discovery, startup, address, status, telemetry)
TYPES = ("responses_api_models", "responses_api_agents", "resources_servers", "environment_servers")


@pytest.mark.parametrize("asks", ASKERS, ids=lambda asks: asks.__name__)
@pytest.mark.parametrize("kind", TYPES)
async def test_every_type(kind, asks, written):
    asks(kind, written)


@pytest.mark.parametrize("asks", ASKERS, ids=lambda asks: asks.__name__)
@pytest.mark.parametrize("kind", TYPES)
async def test_a_type_that_is_not_in_the_list_is_nowhere(kind, asks, written, monkeypatch):
    monkeypatch.delitem(SERVER_TYPES, kind)
    with pytest.raises(GONE):
        asks(kind, written)
    if kind != TYPES[0]:
        asks(TYPES[0], written)
