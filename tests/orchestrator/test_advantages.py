"""Every algorithm with its values."""

import math

import pytest

from shmrl.errors import ConfigError, RunError
from shmrl.orchestrator import advantages
from shmrl.orchestrator.advantages import centred, grpo, leave_one_out, penalised, unit_std
from tests.orchestrator.fakes import tree


def test_the_groups_mean_is_the_baseline():
    assert centred([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert centred([0.3]) == [0.0]
    assert grpo([0.2, 0.2, 0.2], [1, 2, 3]) == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_leave_one_out_compares_with_the_others():
    assert leave_one_out([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])
    assert leave_one_out([1.0]) == [0.0]


def test_the_scale_is_the_population_deviation():
    assert unit_std(centred([1.0, 0.0]), [1.0, 0.0]) == pytest.approx([1.0, -1.0], rel=1e-5)
    assert unit_std([0.0, 0.0], [0.7, 0.7]) == [0.0, 0.0]
    assert grpo([3.0, 1.0, 1.0, 3.0], [1] * 4, std=True) == pytest.approx([1.0, -1.0, -1.0, 1.0], rel=1e-5)


def test_the_longest_pays_the_length_penalty_in_full():
    assert penalised([1.0, 1.0], [50, 100], 0.2) == pytest.approx([0.9, 0.8])
    assert grpo([1.0, 1.0], [50, 100], length_penalty=0.2) == pytest.approx([0.05, -0.05])
    assert penalised([1.0], [0], 0.5) == [1.0]


def test_options_come_from_the_configuration(tmp_path):
    config = {"std": False, "leave_one_out": True}
    assert advantages.load(tree(tmp_path, advantage=config))([1.0, 0.0], [5, 5]) == pytest.approx([1.0, -1.0])


def double(rewards, lengths):
    return [2 * reward + length for reward, length in zip(rewards, lengths, strict=True)]


def short(rewards, lengths):
    return [math.nan] * len(rewards)


def test_a_custom_function_is_found_and_checked(tmp_path):
    here = "tests.orchestrator.test_advantages"
    assert advantages.load(tree(tmp_path, advantage={"kind": "custom", "path": f"{here}:double"}))([1.0], [3]) == [5.0]
    with pytest.raises(RunError, match=r"short answered \[nan, nan\] for a group of 2"):
        advantages.load(tree(tmp_path, advantage={"kind": "custom", "path": f"{here}:short"}))([1.0, 0.0], [3, 3])
    with pytest.raises(ConfigError, match="no attribute 'nothing'"):
        advantages.load(tree(tmp_path, advantage={"kind": "custom", "path": f"{here}:nothing"}))
