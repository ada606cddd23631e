"""What OpenEnv 0.10 and AgileRL 2.58 really send, replayed: the same answers, but for what was wrong with them.

The recordings are of OpenEnv's server in front of an echo environment, with two places, and of AgileRL's with six. What
they show and this server does not do:

- A client that leaves in the middle of a step held its place until the step's end (OpenEnv: connection 7 was refused
  with a place that nobody used; an abort in a step of 4 s held it for 4.12 s): `test_a_client_that_vanishes...`.
- The idle reaper closed the environment under a live socket, and its next step ran on the closed environment
  (`idle_reaper_0.10.0.txt`): `test_an_idle_session_is_closed_and_never_stepped_again` in test_sessions.
- Refusing a peer that had closed already raised an exception that nobody handled: `test_a_refused_client_that_is_gone`.
- A step had no deadline at the server, so that a hung one held its place for ever:
  `test_a_hung_step_ends_at_its_deadline` in test_sessions.
- A refused client whose first message came after the close saw an empty close: here it has a second to speak first.
"""

import json
import logging
from pathlib import Path

import pytest

from tests.env.sessions.conftest import Socket

DATA = Path(__file__).parents[2] / "data" / "sessions"
RECORDINGS = {
    "openenv_0.10": ("OpenEcho", {}, 2),
    "agilerl_2.58": ("TextEcho", {"system_prompt": "be brief"}, 6),
}
"""Environment, its arguments, places."""


def events(name):
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def shape(value):
    """Keys, all the way down."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else None


def essence(frame):
    """Type, keys, code, reward and done of a frame: whatever a client decides by."""
    data = frame["data"]
    told = {key: data.get(key) for key in ("code", "reward", "done", "active_sessions", "max_sessions", "step_count")}
    return frame["type"], shape(data), told


@pytest.mark.parametrize("name", RECORDINGS)
async def test_recorded_clients_get_the_answers_they_got(sessions, name):
    environment, args, places = RECORDINGS[name]
    compared = 0
    async with sessions(environment, args, max_concurrent_envs=places) as client:
        sockets: dict[int, Socket] = {}
        for event in events(name):
            number = event["conn"]
            if event.get("ev") == "open":
                sockets[number] = await client.open(event["path"])
            elif event.get("ev") == "closed" and event["side"] == "c>s":
                if number in sockets:
                    await sockets.pop(number).ws.close()
            elif event.get("dir") == "c>s" and number in sockets:
                await sockets[number].ws.send_str(event["frame"])
            elif event.get("dir") == "s>c" and number in sockets:
                recorded = json.loads(event["frame"])
                got = dict(zip(("type", "data"), await sockets[number].hear(), strict=True))
                assert essence(got) == essence(recorded)
                compared += 1
            elif event.get("ev") == "closed" and number in sockets:  # by the server
                assert await sockets.pop(number).closed() == event["code"]
        for socket in sockets.values():
            await socket.ws.close()
    assert compared == {"openenv_0.10": 13, "agilerl_2.58": 16}[name]


async def test_a_client_that_leaves_in_a_step_leaves_its_place(sessions):
    """Connections 6 and 7 of OpenEnv's recording: the place of a step that nobody awaits is free at once."""
    async with sessions("OpenEcho", max_concurrent_envs=1) as client:
        one = await client.open()
        await one.ask("reset", {})
        await one.ws.send_str('{"type":"step","data":{"message":"sleep 60"}}')
        await one.ws.close()
        two = await client.open()
        assert (await two.ask("reset", {}))[0] == "observation"


async def test_a_refused_client_that_is_gone_already_is_no_error(sessions, caplog):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        one = await client.open()
        await one.ask("reset", {})
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                (await client.open()).vanish()
            await client.get("/health")
        assert {record.levelname for record in caplog.records} <= {"WARNING"}  # of refusals; no error, no traceback
        assert all("refused" in record.message for record in caplog.records)
