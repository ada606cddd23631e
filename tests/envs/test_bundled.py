"""The bundled environments: their tasks come from seeds, their rewards are what their docstrings say."""

import itertools

import pytest

from shmrl.env.interface import Generated, Rubric, SessionRollout, metric, reward, task_seed
from shmrl.envs.alphabet_sort import AlphabetSort
from shmrl.envs.guess_number import GuessNumber
from shmrl.envs.reverse_text import ReverseText, lcs_length, lcs_ratio
from shmrl.types import Task


def first(tasks, n):
    return list(itertools.islice(tasks, n))


@pytest.mark.parametrize(
    ("answer", "target", "length", "ratio"),
    [
        ("cba", "cba", 3, 1.0),
        ("cab", "cba", 2, 2 / 3),
        ("", "cba", 0, 0.0),
        ("", "", 0, 1.0),
        ("c", "cba", 1, 1 / 3),
        ("cbacba", "cba", 3, 0.5),
        ("abcbdab", "bdcaba", 4, 4 / 7),
        ("xyz", "cba", 0, 0.0),
    ],
)
def test_longest_common_subsequence(answer, target, length, ratio):
    assert lcs_length(answer, target) == lcs_length(target, answer) == length
    assert lcs_ratio(answer, target) == pytest.approx(ratio)


@pytest.mark.parametrize("make", [ReverseText, AlphabetSort, lambda seed=0: SessionRollout(GuessNumber, seed)])
def test_tasks_are_functions_of_seed_and_split(make):
    train, again = first(make().tasks("train"), 50), first(make().tasks("train"), 50)
    assert train == again
    assert make().tasks("train")[49] == train[49]
    seeds = [
        {task.seed for task in first(make(seed=seed).tasks(split), 50)}
        for seed in (0, 1)
        for split in ("train", "eval")
    ]
    assert sum(map(len, seeds)) == len(set.union(*seeds)) == 200


def test_reverse_text_draws_lengths_in_the_range():
    texts = [task.data["text"] for task in first(ReverseText(min_length=2, max_length=4).tasks("train"), 300)]
    assert {len(text) for text in texts} == {2, 3, 4}
    assert all(text.isascii() and text.islower() for text in texts)
    assert len(list(ReverseText(num_tasks=7).tasks("eval"))) == 7


def test_reverse_text_demonstrations():
    task = Task("0", {"text": "abcdefgh"}, 11)
    assert ReverseText().demonstrate(task, []) == "hgfedcba"
    noisy = [
        ReverseText(demonstration_noise=0.3).demonstrate(Task("0", {"text": "abcdefgh"}, s), []) for s in range(300)
    ]
    right = sum(a == b for text in noisy for a, b in zip(text, "hgfedcba", strict=True)) / 2400
    assert 0.67 < right < 0.75  # 0.7 + 0.3 / 26
    assert ReverseText(demonstration_noise=0.3).demonstrate(task, []) == noisy[11]


def test_alphabet_sort_demonstrates_turn_by_turn():
    task = Task("0", {"parts": ["ca", "db"]}, 0)
    environment = AlphabetSort()
    assert environment.demonstrate(task, [{"role": "user", "content": "ca"}]) == "ac"
    messages = [{"role": "user"}, {"role": "assistant"}, {"role": "user"}]
    assert environment.demonstrate(task, messages) == "abcd"
    with pytest.raises(ValueError, match="at most 26 letters"):
        AlphabetSort(max_turns=9, letters=3)


def test_guess_number_hints_and_pays_by_guesses():
    game = GuessNumber(high=9, guesses=4)
    seed = next(seed for seed in range(100) if GuessNumber().reset(seed) and _number(seed) == 7)
    assert game.reset(seed) == "1-9"
    assert (game.step("5").observation, game.step("it is 8!").observation) == (">", "<")
    found = game.step("7")
    assert (found.observation, found.reward, found.done) == ("=", 0.5, True)
    game.reset(seed)
    assert [game.step(word).observation for word in ("what", "9", "1")] == ["?", "<", ">"]
    assert game.step("2").done


def _number(seed):
    game = GuessNumber()
    game.reset(seed)
    return game.number


def test_guess_number_demonstrates_a_binary_search():
    for seed in range(30):
        game = GuessNumber()
        messages = [{"role": "user", "content": game.reset(seed)}]
        done = False
        while not done:
            guess = game.demonstrate(Task("0", {}, seed), messages)
            step = game.step(guess)
            messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": step.observation}]
            done = step.done
        assert step.reward > 0


def test_a_rubric_weighs_and_observes():
    rubric = Rubric(
        reward(lcs_ratio, weight=0.5, name="lcs"), reward(lambda a, b: len(a), 0.1, "length"), metric(lcs_length)
    )
    episode = rubric.episode("cab", "cba", stop_reason="done")
    assert episode.reward == pytest.approx(0.5 * 2 / 3 + 0.3)
    assert episode.rewards == {"lcs": pytest.approx(1 / 3), "length": pytest.approx(0.3)}
    assert (episode.metrics, episode.stop_reason) == ({"lcs_length": 2.0}, "done")


def test_generated_sets_end_where_they_should():
    tasks = Generated(lambda i: Task(str(i), {}, i), 3)
    assert [task.seed for task in tasks] == [0, 1, 2]
    for bad in (3, -1):
        with pytest.raises(IndexError):
            tasks[bad]
    assert task_seed(0, "train", 1) % 2 == 0
    assert task_seed(0, "eval", 1) % 2 == 1
