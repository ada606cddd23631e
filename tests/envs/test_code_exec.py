"""`code-exec`: its problems have answers, an answer pays its share of right tests, tests run side by side."""

import asyncio
import random
import uuid

import psutil
import pytest

from shmrl.env import sandbox
from shmrl.env.sandbox import Limits
from shmrl.envs.code_exec import CodeExec, _running
from shmrl.envs.code_problems import PROBLEMS
from shmrl.envs.registry import load
from shmrl.errors import ConfigError


@pytest.fixture
def environment(box):
    sandbox.use("bwrap")
    yield CodeExec
    sandbox.use(None)


def answer(session, right):
    """A program that knows the answers of the first `right` tests."""
    known = dict(session.tests[:right])
    return f"Here it is:\n```python\nknown = {known!r}\nprint(known.get(input(), 'no idea'))\n```\n"


def test_there_are_a_hundred_problems_and_both_splits_have_their_own(environment):
    train, evaluation = ({task.id for task in environment().tasks(split)} for split in ("train", "eval"))
    assert len(train | evaluation) == len({problem.statement for problem in PROBLEMS.values()}) >= 100
    assert not train & evaluation
    assert len(evaluation) >= 20


def test_a_problem_and_its_tests_come_from_the_seed(environment):
    sessions = [environment() for _ in range(3)]
    statements = [session.reset(seed) for session, seed in zip(sessions, (5, 5, 6), strict=True)]
    assert statements[0] == statements[1]
    assert sessions[0].tests == sessions[1].tests != sessions[2].tests
    assert len(sessions[0].tests) == 12


@pytest.mark.parametrize(
    ("name", "given", "printed"),
    [
        ("divisible-3", [1, 3, 5, 9], 12),
        ("greater-10", [10, 11, 12], 2),
        ("largest-2", [4, 9, 7], 7),
        ("rotate-1", [1, 2, 3], "2 3 1"),
        ("window-2", [1, 5, 4, 0], 9),
        ("base-2", [5, 0], "101 0"),
        ("remainder-3", [5, 3, 4, 2], "3 4 2 5"),
        ("pairs-3", [1, 2, 4], 2),
        ("powers-2", [1, 2, 3], 14),
        ("shift-1", "az b", "ba c"),
        ("prefix-2", "abc d", "ab d"),
        ("longer-1", "abc d ef", 2),
        ("chunks-2", "abc de", "badce"),
    ],
)
def test_problems_are_answered_as_they_are_stated(name, given, printed):
    assert PROBLEMS[name].family.solve(PROBLEMS[name].k, given) == printed


def test_every_problem_makes_tests():
    for problem in PROBLEMS.values():
        given, printed = problem.test(random.Random(1))
        assert given
        assert printed


def test_a_right_answer_pays_1_half_of_one_half_and_a_wrong_one_0(environment):
    session = environment(tests=4)
    session.reset(7, problem="divisible-3")
    whole = "print(sum(v for v in map(int, input().split()) if v % 3 == 0))"
    for text, reward in ((whole, 1.0), (answer(session, 4), 1.0), (answer(session, 2), 0.5), ("what?", 0.0)):
        step = session.step(text)
        assert (step.reward, step.done) == (reward, True)


def test_what_ended_a_test_is_observed(environment):
    session = environment(tests=1)
    session.reset(1)
    assert session.step("bytearray(10 << 30)").observation == "memory: MemoryError"
    assert session.step("import sys; sys.exit(3)").observation == "exit code 3"
    assert session.step("print('?')").observation == "wrong"
    assert session.step(answer(session, 1)).observation == "right"


async def test_twelve_sandboxes_overlap(box):
    """All twelve programs of an answer are there at the same time; each waits until it is killed."""
    token = uuid.uuid4().hex
    program = ["/bin/sh", "-c", "while :; do sleep 600; done", token]
    futures = [_running.submit(box.run, program, "", None, Limits(wall_s=600)) for _ in range(12)]

    def programs():
        return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == program]

    async with asyncio.timeout(60):
        while len(found := programs()) < 12:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for process in found:
        process.kill()
    outcomes = [await asyncio.wrap_future(future) for future in futures]
    assert {outcome.code for outcome in outcomes} == {-9}


def test_without_a_sandbox_it_does_not_load():
    with pytest.raises(ConfigError, match=r"set serve\.sandbox = 'bwrap'"):
        load("code-exec", {})


@pytest.mark.parametrize("args", [{"tests": 0}, {"tests": 13}, {"wall_s": 0}])
def test_odd_arguments_are_refused(args, environment):
    with pytest.raises(ValueError, match="1 to 12 tests"):
        environment(**args)
