"""Sessions over WebSocket: exact capacity, deadlines, clients that vanish, idleness, seeds; one process each."""

import asyncio
import logging
import os
import resource
import signal
import socket
from pathlib import Path

import aiohttp
import psutil
import pytest

from shmrl.env.sessions import processes
from shmrl.env.sessions import server as serving
from shmrl.env.sessions.server import SessionServer
from shmrl.errors import ConfigError, PortInUse, TasksetError, WorkerDied
from tests.env.conftest import until
from tests.env.sessions.conftest import ENVS, Client, serving_sessions, session_config
from tests.env.test_server import alive

TCP_REPAIR = 19
"""An option of linux/tcp.h, which Python does not name."""


async def test_two_hundred_racing_clients_and_sixteen_places(sessions):
    async with sessions("TextEcho", max_concurrent_envs=16) as client:

        async def connect():
            socket = await client.open()
            return socket, await socket.ask("reset", {"seed": 1})

        outcomes = await asyncio.gather(*(connect() for _ in range(200)))
        admitted = [socket for socket, (kind, _) in outcomes if kind == "observation"]
        refused = [(socket, data) for socket, (kind, data) in outcomes if kind == "error"]
        assert (len(admitted), len(refused)) == (16, 184)
        for socket, data in refused:
            assert data == {
                "message": "Server at capacity: 16/16 sessions active. Cannot accept new connections.",
                "code": "CAPACITY_REACHED",
                "active_sessions": 16,
                "max_sessions": 16,
            }
            assert await socket.closed() == 1000
        assert len(client.processes()) == 16
        assert (await client.facts())["active_sessions"] == 16
        for socket in admitted:
            await socket.ask("step", {"message": "x"})


async def test_a_refused_client_that_says_nothing_reads_why(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        one, two = await client.open(), await client.open()
        assert (await two.hear())[1]["code"] == "CAPACITY_REACHED"
        assert await two.closed() == 1000
        await one.ask("reset", {})


async def test_every_session_is_a_process_and_datasets_are_loaded_once(sessions):
    async with sessions("GlobalSeed", max_concurrent_envs=3) as client:
        sockets = [await client.open() for _ in range(3)]
        for socket in sockets:
            await socket.ask("reset", {"seed": 1})
        assert len(client.processes()) == 3
        title = client.processes()[0].cmdline()[0]
        assert title.startswith("shmrl:env-session test/")
        await sockets[0].ws.close()
        await client.free(2)
        assert len(client.processes()) == 2


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_a_client_that_vanishes_in_a_step_of_a_minute(sessions, how):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        socket = await client.open()
        await socket.ask("reset", {})
        (process,) = client.processes()
        await socket.ws.send_str('{"type":"step","data":{"message":"sleep 60"}}')
        socket.vanish(how)
        await client.free(timeout_s=1.0)
        assert not alive(process)


async def test_a_client_behind_a_cut_cable_frees_its_place(sessions, monkeypatch):
    """Its socket ends without a packet, as only root can have it: nothing but the kernel's probes can tell."""
    monkeypatch.setattr(serving, "KEEPALIVE", {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 1})
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        cut = await client.open()
        await cut.ask("reset", {})
        end = cut.ws._response.connection.transport.get_extra_info("socket")
        try:
            end.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except PermissionError:
            pytest.skip("TCP_REPAIR needs CAP_NET_ADMIN")
        await until(lambda: _timer(client, cut)[0] == PROBING)  # all that was sent has arrived
        cut.vanish()
        await client.free(timeout_s=20)
        assert client.server.facts()["active_sessions"] == 0


async def test_the_kernel_asks_after_half_a_minute_whether_a_client_is_there(sessions):
    async with sessions("TextEcho") as client:
        one = await client.open()
        await one.ask("reset", {})
        await until(lambda: _timer(client, one)[0] == PROBING)
        assert 0 < _timer(client, one)[1] <= 30


PROBING = "02"


def _timer(client, of):
    """What the kernel's next timer is for on the server's end of a socket, and in how many seconds it is due."""
    theirs = of.ws._response.connection.transport.get_extra_info("socket")
    ends = [f":{port:04X}" for port in (theirs.getpeername()[1], theirs.getsockname()[1])]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    (timer,) = [line[5] for line in lines if [line[1][-5:], line[2][-5:]] == ends]
    kind, _, ticks = timer.partition(":")
    return kind, int(ticks, 16) / os.sysconf("SC_CLK_TCK")


async def test_a_hung_step_ends_at_its_deadline_and_nobody_else_notices(sessions):
    async with sessions("TextEcho", max_concurrent_envs=2, request_timeout_s=0.5) as client:
        hung, other = await client.open(), await client.open()
        await other.ask("reset", {"seed": 1})
        kind, data = await hung.ask("step", {"message": "sleep 60"})
        assert (kind, data["code"]) == ("error", "SESSION_ERROR")
        assert data["message"] == (
            "no answer within 0.5 s (serve.request_timeout_s): the environment's process was killed"
        )
        assert await hung.closed() == 1000
        await client.free(1)
        assert len(client.processes()) == 1
        assert (await other.ask("step", {"message": "x"}))[0] == "observation"


async def test_an_idle_session_is_closed_and_never_stepped_again(sessions, tmp_path):
    """All places are held by clients that say nothing any more: all are free after the timeout."""
    async with sessions("Recording", {"directory": str(tmp_path)}, max_concurrent_envs=4, idle_timeout_s=0.5) as client:
        sockets = [await client.open() for _ in range(4)]
        for socket in sockets:
            await socket.ws.send_json({"type": "reset", "data": {"seed": 1}})
        for socket in sockets:
            assert (await socket.hear())[0] == "observation"
            kind, data = await socket.hear()
            assert (kind, data["code"]) == ("error", "SESSION_ERROR")
            assert "idle for 0.5 s" in data["message"]
            await socket.ws.send_str('{"type":"step","data":{"message":"late"}}')
            assert await socket.closed() == 4408
        await client.free()
        assert [file.read_text() for file in tmp_path.iterdir()] == ["reset\nclose\n"] * 4


async def test_a_step_is_no_idleness(sessions):
    async with sessions("TextEcho", idle_timeout_s=0.2) as client:
        socket = await client.open()
        assert (await socket.ask("step", {"message": "sleep 0.6"}))[0] == "observation"


async def test_the_environment_is_closed_when_its_client_leaves(sessions, tmp_path):
    async with sessions("Recording", {"directory": str(tmp_path)}, max_concurrent_envs=2) as client:
        polite, curt = await client.open(), await client.open()
        for socket in (polite, curt):
            await socket.ask("reset", {"seed": 1})
        await polite.ws.send_str('{"type":"close"}')
        assert await polite.closed() == 1000
        curt.vanish()
        await client.free()
        assert [file.read_text() for file in tmp_path.iterdir()] == ["reset\nclose\n"] * 2


async def test_a_process_that_dies_ends_its_session_alone(sessions):
    async with sessions("TextEcho", max_concurrent_envs=2) as client:
        one, two = await client.open(), await client.open()
        await two.ask("reset", {})
        kind, data = await one.ask("step", {"message": "exit 3"})
        assert (kind, data["code"]) == ("error", "SESSION_ERROR")
        assert "the environment's process (pid" in data["message"]
        assert await one.closed() == 1000
        assert (await two.ask("step", {"message": "x"}))[0] == "observation"


@pytest.mark.parametrize("environment", ["TextEcho", "Threaded"])
async def test_what_a_session_leaves_behind_ends_with_it(sessions, environment):
    async with sessions("Littering") as client:
        socket = await client.open()
        _, data = await socket.ask("step", {"message": "x"})
        litter = psutil.Process(int(data["observation"]["prompt"]))
        assert litter.is_running()
        (process,) = client.processes()
        process.kill()
        await until(lambda: not litter.is_running(), 5)


@pytest.mark.parametrize("beside", range(3))
async def test_eight_sessions_of_two_groups_share_problems_by_group(sessions, beside):
    async with sessions("GlobalSeed", max_concurrent_envs=9) as client:
        noise = await client.open()
        sockets = [await client.open() for _ in range(8)]
        resets = [socket.ask("reset", {"seed": 7 + index // 4}) for index, socket in enumerate(sockets)]
        _, *answers = await asyncio.gather(noise.ask("reset", {"seed": beside}), *resets)
        problems = [data["observation"]["prompt"] for _, data in answers]
        assert (len(set(problems[:4])), len(set(problems[4:])), len(set(problems))) == (1, 1, 2)


async def test_sessions_without_a_seed_differ(sessions):
    async with sessions("GlobalSeed") as client:
        sockets = [await client.open() for _ in range(2)]
        first, second = [(await socket.ask("reset", {}))[1]["observation"]["prompt"] for socket in sockets]
        assert first != second


async def test_rows_of_a_task_set(sessions):
    async with sessions("Rows") as client:
        socket = await client.open()

        async def prompt(**data):
            return (await socket.ask("reset", data))[1]["observation"]["prompt"]

        assert await prompt(row_index=3) == "train 3 3"
        assert await prompt(row_index=3, evaluation=True) == "eval 3 3"
        assert await prompt(seed=7) == "train 2 2"
        assert (await socket.ask("state"))[1]["dataset_size"] == 5


async def test_threads_are_not_forked(sessions, caplog):
    with caplog.at_level(logging.INFO):
        async with sessions("Threaded") as client:
            one, two = await client.open(), await client.open()
            assert (await one.ask("reset", {"seed": 3}))[0] == "observation"
            assert (await two.ask("reset", {"seed": 3}))[0] == "observation"
    assert "has 1 threads after loading: sessions are started afresh instead of forked" in caplog.text


async def test_messages_sent_ahead_are_answered_in_order(sessions):
    async with sessions("OpenEcho") as client:
        socket = await client.open()
        for text in ("sleep 0.1", "b", "c"):
            await socket.ws.send_json({"type": "step", "data": {"message": text}})
        echoed = [(await socket.hear())[1]["observation"]["echoed"] for _ in range(3)]
        assert echoed == ["sleep 0.1", "b", "c"]


async def test_answers_that_json_cannot_carry_are_the_environments_error(sessions):
    async with sessions("Heavy") as client:
        socket = await client.open()
        kind, data = await socket.ask("step", {"message": "nan"})
        assert (kind, data["code"]) == ("error", "EXECUTION_ERROR")
        kind, data = await socket.ask("step", {"message": "0.5"})
        assert (data["reward"], sorted(data["observation"]["what"])) == (0.5, [1, 2])


async def test_a_client_that_stops_to_read_is_idle(sessions):
    async with sessions("Heavy", idle_timeout_s=0.3) as client:
        socket = await client.open()
        await socket.ask("reset", {})
        socket.ws._response.connection.transport.pause_reading()
        await socket.ws.send_str('{"type":"step","data":{"message":"much"}}')
        await client.free(1, 5)
        await client.free(0, 5)
        socket.vanish()


async def test_more_sessions_than_open_files_are_refused(sessions, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with pytest.raises(ConfigError, match=r"max_concurrent_envs = 1000 takes 4,256 open files, .* limit is 1,024"):
        async with sessions("TextEcho", max_concurrent_envs=1000):
            pass


async def test_the_http_routes(sessions):
    async with sessions("OpenEcho", max_concurrent_envs=1) as client:
        assert await client.get("/health") == (200, {"status": "healthy"})
        facts = {"alive": True, "ready": True, "active_sessions": 0, "max_sessions": 1, "restarts": 0}
        assert await client.get("/healthz") == (200, facts)
        _, metadata = await client.get("/metadata")
        assert list(metadata) == [
            "name", "description", "readme_content", "version", "author", "documentation_url",
        ]  # fmt: skip
        assert metadata["name"] == "OpenEcho"
        _, schema = await client.get("/schema")
        assert list(schema) == ["action", "observation", "state", "reset_observation"]
        assert schema["action"]["properties"]["message"] == {"default": "", "title": "Message", "type": "string"}
        assert await client.get("/state") == (200, {"episode_id": None, "step_count": 0})
        status, reset = await client.get("/reset", "POST", json={"seed": 3, "episode_id": "e1", "x": 2})
        observation = {"metadata": {"kw": {"x": 2}}, "echoed": "ready", "seed": 3}
        expected = {"observation": observation, "reward": None, "done": False, "metadata": {"kw": {"x": 2}}}
        assert (status, reset) == (200, expected)
        status, step = await client.get("/step", "POST", json={"action": {"message": "hey"}, "request_id": "r1"})
        assert (status, step["reward"], step["metadata"]) == (200, 3.0, {"n": 1})
        status, fault = await client.get("/reset", "POST", json={"seed": -3})
        assert (status, fault["detail"][0]["type"], fault["detail"][0]["loc"]) == (
            422,
            "greater_than_equal",
            ["body", "seed"],
        )
        status, fault = await client.get("/step", "POST", json={"action": {"nope": 1}})
        assert (status, fault["detail"][0]["type"], fault["detail"][0]["loc"]) == (422, "extra_forbidden", ["nope"])
        status, fault = await client.get("/step", "POST", json={"action": {"message": "boom"}})
        assert (status, fault) == (500, {"detail": "boom in env"})
        socket = await client.open()
        await socket.ask("reset", {})
        status, full = await client.get("/reset", "POST")
        assert (status, full["data"]["code"], full["data"]["active_sessions"]) == (503, "CAPACITY_REACHED", 1)


async def test_alive_is_not_ready(tmp_path):
    """While the environment loads, liveness and readiness differ, and a session that came early waits."""
    server = SessionServer(session_config(ENVS + "Gated", {"directory": str(tmp_path)}))
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    async with aiohttp.ClientSession() as http:
        client = Client(http, server)
        assert await client.get("/health") == (503, {"status": "unhealthy"})
        status, facts = await client.get("/healthz")
        assert (status, facts["alive"], facts["ready"]) == (503, True, False)
        early = await client.open()
        (tmp_path / "open").touch()
        assert (await early.ask("reset", {}))[0] == "observation"
        assert await client.get("/health") == (200, {"status": "healthy"})
        client.close()
        server.stop()
        await running


async def test_clients_that_vanish_while_the_environment_loads_hold_no_place(tmp_path):
    config = session_config(ENVS + "Gated", {"directory": str(tmp_path)}, max_concurrent_envs=1)
    server = SessionServer(config)
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    async with aiohttp.ClientSession() as http:
        client = Client(http, server)
        for _ in range(2):
            (await client.open()).vanish()
            _, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
            writer.write(b"POST /reset HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
            writer.close()
        socket = await client.open()
        assert server.facts()["active_sessions"] == 0
        (tmp_path / "open").touch()
        assert (await socket.ask("reset", {}))[0] == "observation"
        client.close()
        server.stop()
        await running


async def test_a_server_that_stops_while_the_environment_loads_tells_who_waits(tmp_path):
    server = SessionServer(session_config(ENVS + "Gated", {"directory": str(tmp_path)}))
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    async with aiohttp.ClientSession() as http:
        client = Client(http, server)
        socket = await client.open()
        asking = [asyncio.create_task(client.get(path)) for path in ("/state", "/schema")]
        await socket.ws.send_str("{}")
        await asyncio.sleep(0)
        server.stop()
        assert (await socket.hear())[1]["message"] == "the server is shutting down"
        for asked in asking:
            assert await asked == (503, {"detail": "the server is shutting down"})
        await running


async def test_a_template_that_does_not_fork_in_time_is_killed_and_holds_no_place(sessions, monkeypatch):
    monkeypatch.setattr(processes, "FORK_S", 0.3)
    async with sessions("TextEcho", max_concurrent_envs=2) as client:
        stopped = client.server._template
        os.kill(stopped._process.pid, signal.SIGSTOP)
        gone, waiting = await client.open(), await client.open()
        gone.vanish()
        kind, data = await waiting.hear()
        assert (kind, data["code"]) == ("error", "FACTORY_ERROR")
        assert "no process for a session" in data["message"]
        monkeypatch.undo()
        await client.free(timeout_s=5)
        await stopped.died.wait()
        fresh = await client.open()
        assert (await fresh.ask("reset", {}))[0] == "observation"


async def test_a_process_that_was_buried_before_its_end_was_seen_frees_its_place(sessions, monkeypatch):
    def too_late(pidfd, number):
        raise ProcessLookupError

    async with sessions("TextEcho", max_concurrent_envs=1, request_timeout_s=0.3) as client:
        asked = client.get("/step", "POST", json={"action": {"message": "sleep 60"}})
        asking = asyncio.create_task(asked)
        await client.free(1, 5)
        await until(client.processes)
        (process,) = client.processes()
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: (process.kill(), too_late(*_)))
        assert (await asking)[0] == 504
        await client.free()


@pytest.mark.parametrize("given", [b"Bearer \xff\xfe", b"Bearer", b"\xed\xa0\x80", b"Basic eDp5"])
async def test_a_token_that_is_no_text_is_wrong(sessions, caplog, given):
    async with sessions("TextEcho", token="a-secret-of-16.") as client:
        address = client.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization: " + given + b"\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("rest", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
async def test_a_client_that_leaves_in_its_body_is_no_error_of_ours(sessions, caplog, rest):
    async with sessions("TextEcho") as client:
        for how in ("close", "abort"):
            _, writer = await asyncio.open_connection(*client.server.url.removeprefix("http://").split(":"))
            writer.write(b"POST /reset HTTP/1.1\r\nHost: a\r\n" + rest)
            await writer.drain()
            await client.get("/health")
            getattr(writer.transport, how)()
        assert (await client.get("/state"))[0] == 200
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("environment", ["TextEcho", "Threaded"])
async def test_a_session_has_its_own_link_and_no_other(sessions, environment):
    async with sessions(environment, max_concurrent_envs=2) as client:
        for _ in range(2):
            await (await client.open()).ask("reset", {})
        ends = [_sockets(process.pid) for process in client.processes()]
        assert [len(own) for own in ends] == [1, 1]
        assert len(set.union(*ends, _sockets(client.server._template._process.pid))) == 3


def _sockets(pid):
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {link for link in links if link.startswith("socket:")}


async def test_a_hung_request_ends_at_its_deadline(sessions):
    async with sessions("OpenEcho", request_timeout_s=0.3) as client:
        status, said = await client.get("/step", "POST", json={"action": {"message": "sleep 60"}})
        assert (status, "no answer within 0.3 s" in said["detail"]) == (504, True)
        assert client.processes() == []


async def test_a_token_is_the_first_part_of_the_path_or_a_bearer_token(sessions):
    async with sessions("TextEcho", token="a-secret-of-16.") as client:
        for path in ("/health", "/wrong/health", "/reset"):
            assert (await client.get(path))[0] in (401, 405)
        assert (await client.get("/a-secret-of-16./health"))[0] == 200
        assert (await client.get("/health", headers={"Authorization": "Bearer a-secret-of-16."}))[0] == 200
        socket = await client.open("/a-secret-of-16./ws")
        assert (await socket.ask("reset", {}))[0] == "observation"


async def test_a_template_that_dies_is_replaced_and_its_sessions_are_told(sessions, caplog):
    async with sessions("TextEcho") as client:
        socket = await client.open()
        await socket.ask("reset", {})
        os.kill(client.server._template._process.pid, signal.SIGKILL)
        kind, data = await socket.hear()
        assert (kind, data["code"]) == ("error", "SESSION_ERROR")
        fresh = await client.open()
        assert (await fresh.ask("reset", {}))[0] == "observation"
        assert (await client.facts())["restarts"] == 1


async def test_a_server_that_stops_tells_its_sessions(sessions):
    async with sessions("TextEcho") as client:
        socket = await client.open()
        await socket.ask("step", {"message": "x"})
        client.server.stop()
        kind, data = await socket.hear()
        assert (kind, data["message"]) == ("error", "the server is shutting down")
        assert await socket.closed() == 1001


async def test_what_cannot_be_served_is_said_at_once(sessions):
    with pytest.raises(TasksetError, match="the data set moved to the moon"):
        async with sessions("Raising"):
            pass
    with pytest.raises(WorkerDied, match="ended with code 3"):
        async with sessions("DyingAtStart"):
            pass
    with pytest.raises(ConfigError, match="serves sessions, and ReverseText has no reset and step"):
        async with serving_sessions("reverse-text"):
            pass
    with pytest.raises(ConfigError, match="can be reached from elsewhere: set serve"):
        async with sessions("TextEcho", http="0.0.0.0:0"):
            pass
    async with sessions("TextEcho") as client:
        taken = client.server.url.removeprefix("http://")
        with pytest.raises(PortInUse, match=rf"in use by .*pid {os.getpid()}"):
            async with sessions("TextEcho", http=taken):
                pass


async def test_a_crowd_that_connects_and_says_nothing_keeps_no_session_out(sessions, monkeypatch):
    """They are more than may wait; sessions that are open, and those that come, do not notice."""
    monkeypatch.setattr("shmrl.env.sessions.server.BESIDE", 64)
    async with sessions("TextEcho", max_concurrent_envs=2) as client:
        first = await client.open()
        await first.ask("reset", {})
        host, port = client.server.url.removeprefix("http://").rsplit(":", 1)
        crowd = []
        try:
            for _ in range(200):
                crowd.append(await asyncio.open_connection(host, int(port)))
            assert (await first.ask("step", {"message": "a"}))[0] == "observation"
            second = await client.open()
            assert (await second.ask("reset", {}))[0] == "observation"
            assert await asyncio.wait_for(crowd[0][0].read(), 10) == b""
        finally:
            for _, writer in crowd:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in crowd), return_exceptions=True)
