"""What is waited for, out of what the parts know."""

import pytest

from shmrl.orchestrator.episodes import Ask
from shmrl.orchestrator.waiting import Waiting
from shmrl.types import Task
from tests.orchestrator.fakes import Client, tree
from tests.orchestrator.test_sinks import group_of


@pytest.fixture
def waiting(tmp_path, worker, parts, arena):
    settings = tree(tmp_path, batch_size=8, group_size=2)
    p = parts(settings, [Client(worker)])
    return p, Waiting(settings, arena, p.episodes, p.sink, p.dispatcher)


def test_the_start_names_who_has_not_answered(waiting):
    _, shown = waiting
    missing = {"inference": None, "trainer": None}
    shown.awaits(missing)
    assert shown.line() == ("starting", "waiting for inference, trainer")
    del missing["inference"]
    assert shown.line()[1] == "waiting for trainer"


async def test_a_batch_says_how_much_of_it_is_there_and_what_holds_it_back(waiting, worker):
    p, shown = waiting
    shown.stage("collect", 3)
    assert shown.line() == ("step 3/1000: [................] 0 of 8 episodes, 0 tokens/s", "no episode runs")
    p.sink.add(await group_of(p, worker, [1.0, 0.0]))
    ask = Ask(p.sources[0], Task("train-17", {}), "a-1", 0, (1,), "train", 0)
    p.episodes._open |= {"t/a/a-1/0": (0.0, ask)}
    text, reason = shown.line()
    assert text.startswith("step 3/1000: [####............] 2 of 8 episodes, ")
    assert reason.startswith("1 episodes run, the oldest for ")
    assert reason.endswith(" s: a, task train-17 (ended after serve.request_timeout_s = 300)")
    p.dispatcher.pause()
    assert shown.line()[1].startswith("an evaluation runs, 1 episodes run")
    p.episodes._open.clear()
    p.sink.close()


def test_an_evaluation_holds_up_a_stage_which_then_goes_on(waiting):
    _, shown = waiting
    shown.stage("train", 4)
    with shown.meanwhile("evaluate", 4):
        assert shown.line()[0] == "step 4/1000: evaluating"
    assert shown.line() == ("step 4/1000: training", "the ranks")
