"""Good messages, mutilated: what a broken client might send. The same ones every time, for a seed."""

import random

SPLICES = (
    "", "\\ud800", "}", "]", '"', "\0", "[", "1e999", "NaN", "-Infinity", "\u2028", "null", "18446744073709551616",
    "[1,2]", '{"1":2}', "1:2,", "9" * 40, "[" * 2000,
)  # fmt: skip


def mutilated(draw: random.Random, good: str) -> str | bytes:
    """A JSON text with one to five faults, one that breaks off, or bytes that are none."""
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randrange(200))
    if kind < 0.2:
        return good[: draw.randrange(len(good))]
    text = list(good)
    for _ in range(draw.randint(1, 5)):
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.choice(SPLICES)
    return "".join(text)
