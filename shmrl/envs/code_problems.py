"""The problems of `code-exec`: small programs from standard input to standard output, generated with their answers.

A family is a sentence with a parameter and the function that answers it; every value of the parameter is one problem.
Inputs are drawn by seed, so the problems take no space and are the same on every machine. Runs in the env workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

_NUMBERS = "The input is one line of integers, separated by single spaces."
_WORDS = "The input is one line of lowercase words, separated by single spaces."


@dataclass(frozen=True, slots=True)
class Family:
    """`text` says what to print, `solve(k, numbers or text)` does it, for every k of `values`."""

    name: str
    reads: Literal["numbers", "text"]
    text: str
    values: range
    solve: Callable[[int, Any], Any]


def _windows(k: int, numbers: list[int]) -> int:
    return max(sum(numbers[i : i + k]) for i in range(len(numbers) - k + 1))


def _base(k: int, number: int) -> str:
    digits = ""
    while number or not digits:
        number, digit = divmod(number, k)
        digits = str(digit) + digits
    return digits


def _shift(k: int, text: str) -> str:
    return "".join(chr((ord(letter) - 97 + k) % 26 + 97) if letter != " " else " " for letter in text)


def _spaced(values: Any) -> str:
    return " ".join(map(str, values))


FAMILIES = (
    Family("divisible", "numbers", "the sum of those that are divisible by {k}", range(2, 14),
           lambda k, x: sum(v for v in x if v % k == 0)),
    Family("greater", "numbers", "how many of them are greater than {k}", range(10, 90, 7),
           lambda k, x: sum(v > k for v in x)),
    Family("largest", "numbers", "the one that is at place {k} when they are sorted, largest first", range(1, 11),
           lambda k, x: sorted(x, reverse=True)[k - 1]),
    Family("rotate", "numbers", "all of them, the first {k} moved to the end", range(1, 13),
           lambda k, x: _spaced(x[k:] + x[:k])),
    Family("window", "numbers", "the largest sum of {k} neighbours", range(2, 12), _windows),
    Family("base", "numbers", "each of them in base {k}", range(2, 10), lambda k, x: _spaced(_base(k, v) for v in x)),
    Family("remainder", "numbers", "all of them sorted by their remainder of division by {k}, those with equal "
           "remainders by their value", range(2, 12), lambda k, x: _spaced(sorted(x, key=lambda v: (v % k, v)))),
    Family("pairs", "numbers", "how many pairs (those at places i < j) have a sum that is divisible by {k}",
           range(2, 12), lambda k, x: sum((a + b) % k == 0 for a, b in combinations(x, 2))),
    Family("powers", "numbers", "the sum of their powers with exponent {k}", range(2, 6),
           lambda k, x: sum(v**k for v in x)),
    Family("shift", "text", "the text with every letter replaced by the one {k} places later in the alphabet (after z "
           "comes a), spaces kept", range(1, 26), _shift),
    Family("prefix", "text", "the first {k} letters of each word (all of a shorter one)", range(1, 7),
           lambda k, t: _spaced(word[:k] for word in t.split())),
    Family("longer", "text", "how many words have more than {k} letters", range(1, 8),
           lambda k, t: sum(len(word) > k for word in t.split())),
    Family("chunks", "text", "the text without its spaces, each group of {k} letters reversed (the last group may be "
           "shorter)", range(2, 8), lambda k, t: "".join(
               letters[i : i + k][::-1] for letters in [t.replace(" ", "")] for i in range(0, len(letters), k))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. Example: PROBLEMS["divisible-3"].test(random.Random(0)) == ("38 51 ...", "210")"""

    family: Family
    k: int

    @property
    def statement(self) -> str:
        reads = _NUMBERS if self.family.reads == "numbers" else _WORDS
        return f"Write a Python program. {reads} Print {self.family.text.format(k=self.k)}."

    def test(self, draw: random.Random) -> tuple[str, str]:
        """(standard input, what is to be printed) of one test."""
        if self.family.reads == "numbers":
            numbers = [draw.randint(0, 99) for _ in range(draw.randint(13, 20))]
            return _spaced(numbers), str(self.family.solve(self.k, numbers))
        words = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(8))
        text = " ".join(words)
        return text, str(self.family.solve(self.k, text))


PROBLEMS = {f"{family.name}-{k}": Problem(family, k) for family in FAMILIES for k in family.values}
