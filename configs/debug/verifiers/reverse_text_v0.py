"""reverse-text as an environment of verifiers v0 (0.1), its data set made in code. verifiers finds it by name."""

import random

import verifiers as vf
from datasets import Dataset


def said(completion):
    return (completion[-1]["content"] or "") if completion else ""


def letters(completion, answer, **_):
    """The share of the answer's letters that stand in the reply."""
    return sum(letter in said(completion) for letter in answer) / len(answer)


def exact(completion, answer, **_):
    return float(said(completion) == answer)


def longest(completions, **_) -> list[float]:
    """1 for the longest reply of a group: a function of all its rollouts."""
    lengths = [len(said(completion)) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def load_environment(seed: int = 0, num_tasks: int = 1000, grouped: bool = False) -> vf.Environment:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(4, 7))) for _ in range(num_tasks)]
    rows = [{"prompt": [{"role": "user", "content": word}], "answer": word[::-1]} for word in words]
    functions, weights = [letters, exact], [1.0, 0.5]
    if grouped:
        functions, weights = [*functions, longest], [*weights, 0.25]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=functions, weights=weights))
