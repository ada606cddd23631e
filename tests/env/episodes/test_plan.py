"""What the files say, and what is refused before anything starts."""

import copy

import pytest

from shmrl.config import load_env_server
from shmrl.config.nesting import read_nesting
from shmrl.env.episodes.own import OwnEnvironment
from shmrl.env.episodes.plan import planned
from shmrl.env.episodes.turn import SingleAgentTurnLegacy
from shmrl.errors import ConfigError
from tests.env.episodes.conftest import DATA, ENVS
from tests.env.episodes.environments import Always

AGENT = {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": 7001}}}
WEATHER = {"resources_servers": {"example": {"host": "127.0.0.1", "port": 7002}}}
TURN = {
    "environment_servers": {
        "single_agent_turn": {
            "resources_server": {"type": "resources_servers", "name": "weather"},
            "agent_server": {"type": "responses_api_agents", "name": "agent"},
        }
    }
}
TREE = {"agent": AGENT, "weather": WEATHER, "turn": TURN}
OWN = {
    "environment_servers": {
        "shmrl": {
            "env": {"id": "reverse-text"},
            "model": {"tokenizer": "weights"},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
    }
}
POLICY = {"responses_api_models": {"vllm_model": {"base_url": "http://127.0.0.1:8000/v1", "model": "tiny"}}}


def changed(tree, path, value):
    """A copy in which the key at the dotted path has another value, or none."""
    tree = copy.deepcopy(tree)
    *parents, last = path.split(".")
    where = tree
    for part in parents:
        where = where[part]
    if value is None:
        del where[last]
    else:
        where[last] = value
    return tree


def problems(written, *trees):
    files = [written(tree, f"{name}.yaml") for tree, name in zip(trees, "abc", strict=False)]
    with pytest.raises(ConfigError) as caught:
        planned(files)
    return str(caught.value)


def test_gyms_own_resolved_configuration_is_read():
    plan = planned([DATA / "global_config_dict.yaml"])
    (hosted,) = plan.hosted
    assert hosted.instance.name == "example_single_tool_call_single_agent_turn"
    assert hosted.protocol is SingleAgentTurnLegacy
    assert hosted.table.cleanup_timeout_seconds == 180
    assert hosted.table.default_episode_timeout_seconds == 21600
    assert hosted.table.port == 13079
    assert plan.head == ("127.0.0.1", 11000)
    assert plan.nesting.rest["policy_model_name"] == "stub"


def test_an_own_environment_takes_its_model_from_a_model_server(written):
    tree = changed({"rev": OWN, "policy": POLICY}, "rev.environment_servers.shmrl.num_workers", 3)
    tree = changed(tree, "rev.environment_servers.shmrl.serve", {"lease_s": 60})
    (hosted,) = planned([written(tree)]).hosted
    assert hosted.protocol is OwnEnvironment
    config = hosted.table.env_server_config(hosted.instance, planned([written(tree)]).nesting)
    assert (config.gym.model.urls, config.gym.model.name) == (["http://127.0.0.1:8000"], "tiny")
    assert (config.serve.pool.workers, config.serve.lease_s) == (3, 60)
    assert config.serve.http == "127.0.0.1:0"


def test_flags_are_keys_of_the_nesting(written):
    file = written({**TREE, "turn-2": TURN})
    plan = planned([file], {"turn-2.environment_servers.single_agent_turn.port": "7009"})
    assert plan.nesting.instances["turn-2"].block["port"] == 7009
    with pytest.raises(ConfigError, match="has no turn-3"):
        planned([file], {"turn-3.port": "1"})


def test_a_protocol_of_ones_own_by_its_entrypoint(written):
    tree = {"mine": {"environment_servers": {"always": {"entrypoint": f"{ENVS}Always"}}}}
    (hosted,) = planned([written(tree)]).hosted
    assert hosted.protocol is Always


def test_what_runs_elsewhere_is_known_and_not_started(written):
    there = {"environment_servers": {"nemo_user_sim": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 7003}}}
    plan = planned([written({**TREE, "simulated": there})])
    assert [hosted.instance.name for hosted in plan.hosted] == ["turn"]
    assert "simulated" in plan.nesting.instances


def test_an_instance_declared_twice_is_refused_with_both_places(written):
    told = problems(written, TREE, {"other": 1, "turn": TURN})
    first, second = written(TREE, "a.yaml"), written({"other": 1, "turn": TURN}, "b.yaml")
    assert told == f"turn is declared twice: {first}:11 and {second}:2"


def test_an_instance_declared_twice_in_one_file_is_refused_with_both_lines(written):
    file = written("agent: {}\nturn:\n  a: 1\nturn:\n  b: 2\n")
    with pytest.raises(ConfigError, match=f"turn is declared twice: {file}:2 and {file}:4"):
        planned([file])


def test_an_instance_declared_in_toml_too_is_refused_with_both_places(written, tmp_path):
    file, own = written({"rev": OWN, "policy": POLICY}), tmp_path / "env.toml"
    own.write_text(
        'name = "rev"\nenv.id = "reverse-text"\nserve = { http = "127.0.0.1:0", protocols = ["gym"] }\n'
        'gym.model = { urls = ["http://127.0.0.1:8000"], tokenizer = "weights" }\n'
    )
    with pytest.raises(ConfigError, match=f"rev is declared twice: {file}:1 and {own}"):
        planned([file, own])
    assert len(planned([written({"policy": POLICY}), own]).hosted) == 1


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("turn.environment_servers.single_agent_turn.agent_server", None, "agent_server: missing"),
        ("turn.environment_servers.single_agent_turn.max_episodes", 3, "unknown key; did you mean"),
        ("turn.environment_servers.single_agent_turn.cleanup_timeout_seconds", 0, "cleanup_timeout_seconds = 0"),
        ("turn.environment_servers.single_agent_turn.max_concurrent_episodes", 3, "needs queue_timeout_seconds"),
        ("turn.environment_servers.single_agent_turn.num_workers", 2, "num_workers = 2"),
        ("turn.environment_servers.single_agent_turn.port", "many", "port = 'many'"),
        ("turn.environment_servers.single_agent_turn.port", "???", "port = '???': that is Gym's to resolve"),
        ("turn.environment_servers.single_agent_turn.agent_server.name", "${agent}", "gym env resolve"),
        ("turn._inherit_from", "single_agent_turn", "_inherit_from = 'single_agent_turn': that is Gym's to resolve"),
        ("turn.environment_servers.single_agent_turn.agent_server.type", "agents", "unknown server type"),
        ("turn.environment_servers.single_agent_turn.agent_server.type", "resources_servers", "responses_api_agents"),
        ("turn.environment_servers.single_agent_turn.agent_server.name", "nobody", "no responses_api_agents is called"),
        ("agent.responses_api_agents.simple_agent.port", None, "host and port must be given"),
        ("turn.environment_servers.single_agent_turn.resources_tool_transports", ["ftp"], "resources_tool_transports"),
        ("turn.environment_servers", {"a": {}, "b": {}}, "exactly one implementation"),
        ("turn.resources_servers", {"example": {}}, "one server type"),
        ("turn", {"enviroment_servers": {"x": {"entrypoint": "app.py"}}}, "did you mean environment_servers?"),
        ("turn", None, "nothing to start here"),
        ("head_server", 11000, "head_server = 11000"),
        ("turn.environment_servers", {"mine": {"entrypoint": "nowhere:Protocol"}}, "No module named"),
        ("turn.environment_servers", {"mine": {"entrypoint": "json:JSONDecoder"}}, "not a subclass of Protocol"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(written, path, value, said):
    told = problems(written, changed(TREE, path, value))
    assert said in told
    assert "a.yaml" in told or "head_server" in told or "called" in told


def test_a_file_that_is_no_yaml_is_refused(written, tmp_path):
    for text, said in (("a: [", "while parsing"), ("- a", "a map of server instances"), ("", "nothing to start")):
        with pytest.raises(ConfigError, match=said):
            planned([written(text)])
    with pytest.raises(ConfigError, match="No such file"):
        read_nesting([tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('serve = { http = "127.0.0.1:0", protocols = ["gym"] }', "belong together"),
        ('gym.model = { urls = ["http://a"], tokenizer = "w" }', "belong together"),
        ('serve = { http = "127.0.0.1:0", protocols = ["gym", "openenv"] }', "a port serves one of them"),
        ('serve.protocols = ["gym"]\ngym.model = { urls = ["http://a"], tokenizer = "w" }', 'need http = "host:port"'),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path, text, said):
    file = tmp_path / "env.toml"
    file.write_text(f'env.id = "reverse-text"\n{text}\n')
    with pytest.raises(ConfigError, match=said):
        load_env_server([file])
