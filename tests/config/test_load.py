"""One tree, every fault at once, flags as TOML values, a dump that reads back equal."""

from pathlib import Path

import pytest

from shmrl.config import dump_toml, env_server_from, load_env_server, load_run
from shmrl.errors import ConfigError

GOOD = """
[run]
name = "x"
[model.tiny]
[orchestrator]
batch_size = 32
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
[[orchestrator.train.source]]
name = "b"
env.id = "alphabet-sort"
[[orchestrator.eval.source]]
name = "c"
env.id = "reverse-text"
"""


def write(tmp_path, text, name="run.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def problems(tmp_path, text, flags=None):
    with pytest.raises(ConfigError) as caught:
        load_run([write(tmp_path, text)], flags)
    return caught.value.problems


def test_the_resolved_tree_reads_back_equal(tmp_path):
    tree = load_run([write(tmp_path, GOOD)])
    assert load_run([write(tmp_path, dump_toml(tree), "again.toml")]) == tree
    server = env_server_from(tree, 1)
    assert load_env_server([write(tmp_path, dump_toml(server), "env.toml")]) == server


def test_addresses_are_derived_in_config_order_train_first(tmp_path):
    tree = load_run([write(tmp_path, GOOD)], {"orchestrator.env_server_base_port": "6100"})
    assert [source.name for _, source in tree.sources] == ["a", "b", "c"]
    assert [tree.env_address(i) for i in range(3)] == [f"tcp://127.0.0.1:{6100 + i}" for i in range(3)]
    assert env_server_from(tree, 2).split == "eval"


def test_every_fault_at_once_with_file_key_value_and_suggestion(tmp_path):
    text = GOOD.replace("batch_size", "batch_sise") + '\n[traner]\nranks = 2\n[inference]\nport = "high"\n'
    found = problems(tmp_path, text)
    path = str(tmp_path / "run.toml")
    assert f"{path}: orchestrator.batch_sise = 32: unknown key; did you mean batch_size?" in found
    assert f"{path}: traner = {{'ranks': 2}}: unknown key; did you mean trainer?" in found
    assert any(line.startswith(f"{path}: inference.port = 'high': ") for line in found)


def test_later_files_win_and_flags_win_over_files(tmp_path):
    first = write(tmp_path, GOOD)
    second = write(tmp_path, "[orchestrator]\nbatch_size = 64\n[run]\nseed = 5\n", "over.toml")
    tree = load_run([first, second], {"run.seed": "7", "orchestrator.train.source.1.sampling.max-tokens": "9"})
    assert (tree.orchestrator.batch_size, tree.run.seed) == (64, 7)
    assert [s.sampling.max_tokens for s in tree.orchestrator.train.source] == [128, 9]


def test_a_flag_fault_names_the_flag(tmp_path):
    assert problems(tmp_path, GOOD, {"trainer.rank": "2"}) == [
        "--trainer.rank: trainer.rank = 2: unknown key; did you mean ranks?"
    ]
    assert "has 2 items" in problems(tmp_path, GOOD, {"orchestrator.train.source.5.ratio": "2"})[0]
    assert problems(tmp_path, GOOD, {"traner.ranks": "2"}) == [
        "--traner.ranks: traner = {'ranks': 2}: unknown key; did you mean trainer?"
    ]


def test_a_fault_of_several_keys_names_the_file_and_the_flags_that_made_it(tmp_path):
    assert problems(tmp_path, GOOD, {"orchestrator.batch-size": "30"}) == [
        f"{tmp_path}/run.toml, --orchestrator.batch-size: orchestrator.batch_size = 30 is not a multiple of {name}'s "
        "group_size = 8"
        for name in "ab"
    ]


def test_a_fault_of_several_keys_does_not_name_flags_of_others(tmp_path):
    flags = {"orchestrator.batch-size": "30", "orchestrator.env-server-base-port": "7000"}
    for line in problems(tmp_path, GOOD, flags):
        assert line.startswith(f"{tmp_path}/run.toml, --orchestrator.batch-size: orchestrator.batch_size = 30 is not")


def test_a_file_that_is_not_there_is_named_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_run([tmp_path / "none.toml"])
    assert caught.value.problems == [f"{tmp_path}/none.toml: No such file or directory"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("batch_size = 32", "batch_size = 30"), "batch_size = 30 is not a multiple of a's group_size = 8"),
        (('name = "b"', 'name = "a"'), "two sources are called 'a'"),
        (('name = "b"', 'name = "b"\nsampling.top_p = 0.9'), "without top_k"),
        (("[model.tiny]", '[model]\npath = "x"\n[model.tiny]'), "exactly one of model.path and [model.tiny]"),
        (("[model.tiny]", "[model.tiny]\ntop_k = 9"), "top_k = 9 of 8 experts"),
        (
            ("[model.tiny]", "[trainer]\nhead = 65\n[model.tiny]"),
            "head = 65 exceeds the engine's max_logprobs = 64",
        ),
        (
            ("[model.tiny]", "[trainer]\nranks = 3\ncontext_parallel = 2\n[model.tiny]"),
            "3 is not a multiple of context_par",
        ),
        (("[model.tiny]", "[trainer]\nfsdp = true\ncpu_offload = true\n[model.tiny]"), "off a CUDA device: set both"),
        (
            ("[model.tiny]", "[trainer]\ncompile = true\nactivation_checkpointing = true\n[model.tiny]"),
            "what is recomputed may run another graph",
        ),
        (
            ("[model.tiny]", "[trainer]\ncompile = true\nranks = 2\ncontext_parallel = 2\n[model.tiny]"),
            "from other ranks, which is not compiled",
        ),
        (
            ("[model.tiny]", "[warmup]\nsteps = 1\n[trainer.lora]\nrank = 2\nalpha = 4\n[model.tiny]"),
            "[trainer.lora] keeps the model it started from",
        ),
        (("[model.tiny]", "[trainer.loss]\nscore_centering = true\n[model.tiny]"), "set trainer.head"),
        (("[model.tiny]", '[arena]\ncapacity = "4 apples"\n[model.tiny]'), "not a size: '4 apples'"),
        (
            ("[model.tiny]", "[trainer]\nhead = 300\n[inference]\nmax_logprobs = 300\n[model.tiny]"),
            "head = 300 exceeds model.tiny.vocab = 264",
        ),
        (
            (
                '"x"',
                '"x"\nrestarts.trainer = 1\n[arena]\nretain_steps = 2\n[trainer.checkpoint]\ninterval = 5',
            ),
            "goes back to its last checkpoint, up to 4 steps before the current one (trainer.checkpoint.interval = 5, "
            "run.max_steps = 100), but arena.retain_steps = 2: set it to 4, or the interval to 3",
        ),
        (
            ('name = "b"', 'name = "b"\nserve.pool.workers = 300'),
            "308 processes would attach to the arena, which has 256 places",
        ),
        (
            ('name = "b"', 'name = "b"\nserve.pool = { kind = "elastic", max_workers = 300, per_worker = 8 }'),
            "308 processes would attach to the arena, which has 256 places",
        ),
        (
            ('name = "b"', 'name = "b"\nserve.pool = { kind = "elastic", workers = 3 }'),
            "an elastic pool takes max_workers and per_worker, and no workers",
        ),
        (
            ('name = "b"', 'name = "b"\nserve.pool = { workers = 3, per_worker = 8 }'),
            "max_workers and per_worker are for kind = 'elastic'",
        ),
    ],
)
def test_impossible_combinations_fail_while_loading(tmp_path, change, message):
    found = problems(tmp_path, GOOD.replace(*change))
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.optimizer.lr", "inf", "must be a finite number"),
        ("orchestrator.connect_timeout_s", "nan", "must be a finite number"),
        ("arena.orphan_ttl_s", "inf", "must be a finite number"),
        ("arena.orphan_ttl_s", "nan", "must be a finite number"),
        ("arena.orphan_ttl_s", "2147483649.0", "must be less than or equal to 2147483648"),
        ("trainer.optimizer.betas", "[0.9, 1.5]", "must be less than 1"),
        ("trainer.device", "tpu", 'must be "cpu", "cuda" or "cuda:N"'),
        ("run.seed", "9223372036854775808", "must be less than 9223372036854775808"),
        ("inference.urls", '["engine:8000"]', "must be a URL, as "),
        ("orchestrator.train.source.0.serve.address", "tcp://elsewhere", 'must be "tcp://host:port" or "ipc://path"'),
    ],
)
def test_values_that_no_process_could_use_fail_while_loading(tmp_path, key, value, message):
    (found,) = problems(tmp_path, GOOD, {key: value})
    assert message in found


def test_names_have_room_in_the_tags_of_blocks(tmp_path):
    flags = {"run.name": "r" * 64, "orchestrator.train.source.1.name": "s" * 20}
    assert problems(tmp_path, GOOD, flags)[0].endswith("exceeds 112 bytes")
    assert load_run([write(tmp_path, GOOD)], {**flags, "orchestrator.train.source.1.name": "s" * 19})


def test_an_engine_on_an_ipv6_host_has_a_url_in_brackets(tmp_path):
    tree = load_run([write(tmp_path, GOOD)], {"inference.host": "::1"})
    assert tree.inference.engine_urls == ["http://[::1]:8000"]


def test_unreadable_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_run([tmp_path / "nowhere.toml"])
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load_run([write(tmp_path, "[run\n")])


def test_spilling_needs_its_directory_and_nothing_else_does(tmp_path):
    rule = "spill_dir (an existing directory) belongs to on_full = 'spill', and only there"
    for table in ("on_full = 'spill'", "spill_dir = '/tmp'"):
        assert any(rule in problem for problem in problems(tmp_path, GOOD + f"[arena]\n{table}\n"))
    tree = load_run([write(tmp_path, GOOD + "[arena]\non_full = 'spill'\nspill_dir = '/tmp'\n")])
    assert (tree.arena.on_full, str(tree.arena.spill_dir)) == ("spill", "/tmp")


def test_shares_are_read_as_they_are_written(tmp_path):
    text = GOOD + '[arena]\ncapacity = "8GiB"\nshares = {a = 0.5, c = "2GiB", b = 1048576}\n'
    tree = load_run([write(tmp_path, text)])
    assert tree.arena.shares == {"a": 0.5, "c": "2GiB", "b": 1 << 20}
    assert load_run([write(tmp_path, dump_toml(tree), "resolved.toml")]).arena.shares == tree.arena.shares


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("shares = {aa = 0.5}", "arena.shares.aa: no source has this name; did you mean a?"),
        ("shares = {math = 0.5}", "arena.shares.math: no source has this name; sources are a, b, c"),
        ("shares = {a = 0.5, b = 0.6}", "exceed the capacity"),
        ("capacity = '1GiB'\nshares = {a = '2GiB'}", "2,147,483,648 bytes together ({'a': 2147483648}) exceed"),
        ("shares = {a = '2GiB'}", "shares of a are sizes: they need capacity"),
        ("shares = {a = 1.5}", "share 1.5 of 'a': a fraction is above 0 and at most 1.0"),
        ("capacity = '1GiB'\nshares = {a = 1}", "share of 1 bytes for 'a': at least 65536"),
    ],
)
def test_shares_that_cannot_be_fail_while_loading(tmp_path, table, message):
    assert any(message in problem for problem in problems(tmp_path, GOOD + f"[arena]\n{table}\n"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("[node]\naddress = '0.0.0.0:7070'", "a host that others can reach it by, and a port"),
        ("[node]\naddress = '10.0.0.5:70700'", "a host that others can reach it by, and a port"),
        ("[node]\naddress = '10.0.0.5:0'", "its ranks could not tell the port"),
        ("[node]\naddress = '10.0.0.5'", "node.address = '10.0.0.5'"),
        ("[node]\naddress = '10.0.0.5:7070'\ncertificate = 'c.pem'", "certificate and key belong together"),
        ("[node]\ncertificate = 'c.pem'\nkey = 'k.pem'", "node.certificate and node.key belong to a node.address"),
        ("[arena]\ntransport = 'rdma'", "arena.transport = 'rdma'"),
        ("[arena]\nfetch_capacity = '1GiB'", "shares of fetched are sizes: they need capacity"),
        ("[arena]\nshares = {a = 0.7}\nfetch_capacity = 0.5", "exceed the capacity"),
    ],
)
def test_a_node_that_cannot_be_fails_while_loading(tmp_path, tables, message):
    assert any(message in problem for problem in problems(tmp_path, GOOD + tables + "\n"))


def test_serve_http_is_for_a_server_with_an_arena_of_its_own(tmp_path):
    text = "[env]\nid = 'reverse-text'\n[serve]\nhttp = '10.0.0.5:7071'\n"
    assert load_env_server([write(tmp_path, text)]).serve.http == "10.0.0.5:7071"
    with pytest.raises(ConfigError, match=r"serve\.http belongs to a server with an arena of its own"):
        load_env_server([write(tmp_path, text + "[arena]\naddress = 'shm:ab'\n")])
    with pytest.raises(ConfigError, match=r"a's serve\.http is for a server started by hand"):
        load_run([write(tmp_path, GOOD)], {"orchestrator.train.source.0.serve.http": "10.0.0.5:7071"})


def test_a_node_server_has_a_url_and_the_copies_a_share(tmp_path):
    assert load_run([write(tmp_path, GOOD)]).node.url is None
    text = GOOD + "[arena]\nshares = {a = 0.5}\nfetch_capacity = 0.25\n[node]\naddress = '[::1]:7070'\n"
    tree = load_run([write(tmp_path, text)])
    assert tree.node.url == "http://[::1]:7070"
    assert tree.arena.guaranteed == {"a": 0.5, "fetched": 0.25}
    tls = {"node.certificate": "c.pem", "node.key": "k.pem", "node.ca": "/ca.pem"}
    tree = load_run([write(tmp_path, text)], tls).absolute()
    assert tree.node.url == "https://[::1]:7070"
    assert (tree.node.key, str(tree.node.ca)) == (Path("k.pem").resolve(), "/ca.pem")


def test_writers_that_may_spill_wait_half_a_second_unless_told_otherwise(tmp_path):
    spill = GOOD + "[arena]\non_full = 'spill'\nspill_dir = '/tmp'\n"
    assert load_run([write(tmp_path, GOOD)]).arena.timeout_s == 60.0
    assert load_run([write(tmp_path, spill)]).arena.timeout_s == 0.5
    assert load_run([write(tmp_path, spill + "timeout_s = 7.0\n")]).arena.timeout_s == 7.0
    tree = load_run([write(tmp_path, GOOD)], {"arena.on-full": "spill", "arena.spill-dir": "/tmp"})
    assert tree.arena.timeout_s == 0.5


URLS = 'env.url = ["http://a:8000", "http://b:8000/token"]\nenv.max_turns = 4'
REMOTE = GOOD.replace('env.id = "reverse-text"', URLS)


def test_a_remote_source_is_the_id_of_its_urls(tmp_path):
    tree = load_run([write(tmp_path, REMOTE)], {"orchestrator.max_inflight": "48"})
    spec = tree.orchestrator.train.source[0].env
    assert (spec.id, spec.urls) == (
        "openenv:http://a:8000,http://b:8000/token",
        ["http://a:8000", "http://b:8000/token"],
    )
    assert tree.remote_sessions(spec.urls) == (48, 1)
    assert env_server_from(tree, 0).env.args == {"sessions": [48, 1]}
    shared = load_run([write(tmp_path, REMOTE)], {"orchestrator.eval.source.0.env.args.evaluation-sessions": "4"})
    assert shared.remote_sessions(spec.urls) == (64, 4)
    assert load_run([write(tmp_path, dump_toml(tree), "again.toml")]) == tree
    assert tree.orchestrator.train.source[1].env.urls == []


def test_what_a_remote_source_needs(tmp_path):
    (line,) = problems(tmp_path, GOOD.replace('"reverse-text"', '"openenv:http://a:8000"', 1))
    assert "max_turns is required for openenv:http://a:8000: the environment is someone else's" in line
    (line,) = problems(tmp_path, REMOTE.replace("env.url", 'env.id = "x:Y"\nenv.url', 1))
    assert "id = 'x:Y' and url: give one of them" in line
    (line,) = problems(tmp_path, REMOTE, {"orchestrator.train.source.0.serve.pool.workers": "2"})
    assert "source 'a' is remote: serve.pool.workers = 2, but one worker counts its sessions" in line


def test_protocols_need_a_port(tmp_path):
    (line,) = problems(tmp_path, GOOD, {"orchestrator.train.source.0.serve.protocols": '["openenv"]'})
    assert """protocols = ['openenv'] need http = "host:port\"""" in line


def test_a_legacy_environment_stands_in_the_place_of_env(tmp_path):
    text = GOOD.replace('env.id = "alphabet-sort"', 'legacy = { id = "reverse-text", args = { n = 2 } }')
    tree = load_run([write(tmp_path, text)])
    env = tree.orchestrator.train.source[1].env
    assert (env.id, env.args, env.max_turns) == ("legacy:reverse-text", {"n": 2}, None)
    assert load_run([write(tmp_path, dump_toml(tree), "again.toml")]) == tree
    assert load_env_server([write(tmp_path, dump_toml(env_server_from(tree, 1)), "env.toml")]).env == env
    own = load_env_server([write(tmp_path, '[legacy]\nid = "a"\n', "own.toml")], {"legacy.args.n": "3"})
    assert (own.env.id, own.env.args) == ("legacy:a", {"n": 3})
    assert load_env_server([write(tmp_path, dump_toml(own), "again.toml")]) == own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"\n', "env and legacy: give one of them"),
        ('env.id = "reverse-text"\nlegacy.id = "a"\n', "env and legacy: give one of them"),
        ("[legacy]\nargs = {}\n", "legacy.id: missing"),
        ('[legacy]\nid = "a"\nmax_turn = 3\n', "legacy.max_turn = 3: unknown key; known here: id, args"),
        ('legacy = "a"\n', "legacy = 'a': "),
        ('env.id = "a"\nserve = { python = "p", http = "h:1", protocols = ["openenv"] }\n', "python is of workers"),
    ],
)
def test_exactly_one_environment(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load_env_server([write(tmp_path, text, "env.toml")])
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_an_interpreter_stays_the_link_that_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to("/bin/sh")
    text = GOOD.replace('env.id = "alphabet-sort"', 'env.id = "alphabet-sort"\nserve.python = "python"')
    source = load_run([write(tmp_path, text)]).absolute().orchestrator.train.source[1]
    assert source.serve.python == tmp_path / "python"
