"""What of an address may be shown, and whom it is open to."""

import pytest

from shmrl.config import load_eval, load_run
from shmrl.config.addresses import is_loopback, redacted
from shmrl.config.rundir import RunDir
from shmrl.errors import ConfigError
from tests.config.test_load import GOOD, problems, write

TOKEN = "a-token-of-16-ch"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("openenv:http://a:8000/TOKEN,https://b/TOKEN/", "openenv:http://a:8000/...,https://b/..."),
        ("'ws://u:TOKEN@[::1]:80/TOKEN/ws': no", "'ws://[::1]:80/...': no"),
        ("http://a:8000 cannot be reached", "http://a:8000 cannot be reached"),
        ("htp:///TOKEN", "htp:///..."),
        ("ipc:///tmp/x and tcp://127.0.0.1:5000", "ipc:///tmp/x and tcp://127.0.0.1:5000"),
        ("http://a?key=TOKEN", "http://a/..."),
        ("my_module:Echo", "my_module:Echo"),
    ],
)
def test_a_url_is_shown_up_to_its_host(text, shown):
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.example.com", "0.0.0.0", "::", "10.0.0.1", "127.", "", "*", "127.0.0.1.nip.io"])
def test_not_loopback(host):
    assert not is_loopback(host)


REMOTE = (
    GOOD
    + f"""
env.max_turns = 1
[[orchestrator.eval.source]]
name = "far"
env = {{ url = "http://10.0.0.1:8000/{TOKEN}", max_turns = 2 }}
serve = {{ token = "{TOKEN}", http = "127.0.0.1:0", protocols = ["openenv"] }}
"""
)


def test_tokens_are_in_the_file_of_the_env_server_that_needs_them_alone(tmp_path):
    tree, run = load_run([write(tmp_path, REMOTE)]), RunDir(tmp_path / "out", 1)
    run.config("trainer").parent.mkdir(parents=True)
    run.config("trainer").touch(0o644)
    run.write_configs(tree)
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert [path for path in files if TOKEN in path.read_text()] == [run.env_config("eval", "far")]
    for role in ("orchestrator", "trainer", "inference"):
        _, source = load_run([run.config(role)]).sources[-1]
        assert source.env.urls == ["http://10.0.0.1:8000/..."]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (", max_turns = 2", ""),
        ("env = { url", 'env = { id = "reverse-text", url'),
        ("http://10.0.0.1:8000/", "http:///"),
        ("max_turns = 2", "max_turn = 2"),
        (f'token = "{TOKEN}"', f'token = "{TOKEN}!"'),
        (f'token = "{TOKEN}"', f'url = "http://10.0.0.1/{TOKEN}"'),
    ],
)
def test_no_fault_shows_a_token(tmp_path, before, after):
    assert before in REMOTE
    assert TOKEN not in "".join(problems(tmp_path, REMOTE.replace(before, after)))


def test_the_name_of_a_url_is_its_host(tmp_path):
    (config,) = load_eval(f"openenv:http://10.0.0.1:8000/{TOKEN}", {"env.max-turns": "2"})
    assert config.name == "openenv-http-10.0.0.1-8000"
    with pytest.raises(ConfigError) as caught:
        load_eval(f"openenv:http://10.0.0.1:8000/{TOKEN}")
    assert TOKEN not in str(caught.value)
