"""Lists every store, CAS and fetch-op on shared memory in csrc/arena_*, and the crash points around them.

`python -m tests.arena.stores` prints the list. A store is a call of a helper of arena_atomics.h, SRL_SET or
SRL_ZERO, or SRL_OUTSIDE where a file changes; these have a point on either side when the crash driver is built, which
`missing()` compares with the points that the driver really has. Anything else that writes through a pointer must be
memory of the process itself (PRIVATE), or `stray()` names it. The other files write nothing but the payload of a block
that is being written.
"""

import re
from collections import Counter
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
STORE = re.compile(r"\b(srl_store(?:32)?_\w+|srl_(?:or|and|add|add32|swap|cas)_sc|SRL_SET|SRL_ZERO|SRL_OUTSIDE)\(")
ATOMIC = re.compile(r"__atomic_(?!load)\w+|__sync_\w+")
COPY = re.compile(r"\b(memcpy|memset|memmove|strcpy)\(([^,]+),")
ASSIGN = re.compile(r"([^=]*?)\s*(?:[-+|&^*/]|<<|>>)?(?<![=!<>])=(?!=)")
STEP = re.compile(r"(?:\+\+|--)([\w>.\[\]-]+)|([\w>.()\[\]-]*[\w\]])(?:\+\+|--)")
PRIVATE = re.compile(
    r"a->(freed|corrupt|nonces|nonces_left\]?|self|is_dead|drop_file|ctx)"  # of srl_arena itself
    r"|a->(h|processes|events|pending|pages|blocks|shares|max_\w+)"
    r"|hold->\w+|a->holds\[slot\]\.count"  # private counts
    r"|r->(slot|generation|nonce|offset|share|borrows)"  # out parameters, as are the next
    r"|\*?out(->\w+)?|\*(offset|nonce|slot|w|pages|free_cells|at|len|since_ns)"
    r"|live->\w+|\(?r\)->\w+|made\..*"  # locks of this process, the report, locals
)

READERS = ("arena_walk.c",)  # runs over mappings that are PROT_READ too: a store there would be a SIGSEGV
LOCAL = ("tag", "a")  # targets of memcpy and memset


def sources():
    """{name: text without comments and strings, line numbers kept} of the files that touch shared memory."""
    out = {}
    for path in sorted([*CSRC.glob("arena_*.c"), CSRC / "arena_atomics.h"]):
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.S)
        out[path.name] = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    return out


def stores():
    """[(file, line, what)] of every store that goes through a helper."""
    found = []
    for name, text in sources().items():
        body = text if name.endswith(".c") else text[text.index('#include ""\n') :]  # helpers are defined above it
        first = text.count("\n") - body.count("\n") + 1
        found += [(name, first + body.count("\n", 0, m.start()), m[1]) for m in STORE.finditer(body)]
    return found


def stray():
    """[(file, line, text)] of writes through pointers that are neither helpers nor private memory."""
    found = []
    for name, text in sources().items():
        if name.endswith(".h") or name in READERS:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found += [(name, number, target) for target in _targets(line) if not PRIVATE.fullmatch(target)]
    return found


def _targets(line):
    if line.startswith("#") or line.lstrip().startswith("."):  # preprocessor, designated initialisers
        return
    yield from (m[0] for m in ATOMIC.finditer(line))
    yield from (f"*{m[2].strip()}" for m in COPY.finditer(line) if m[2].strip() not in LOCAL)
    assigned = (ASSIGN.match(part) for part in re.split(r"[;{}(,]", line))
    steps = STEP.finditer(line) if "++" in line or "--" in line else ()
    for match in [*filter(None, assigned), *steps]:
        target = next(group for group in match.groups() if group is not None).strip()
        declared = re.fullmatch(r"(?:const |static |unsigned |struct )*\w+ +\*?\w+(\[.*\])?", target)
        if not declared and ("->" in target or "[" in target or target.startswith("*")):
            yield target


def missing(points):
    """What the driver's points (lines of `crash_driver points`) lack on either side of a store, as text."""
    have = Counter()
    for line in points:
        _, place, _, side = line.split()
        have[Path(place.rsplit(":", 1)[0]).name, side] += 1
    want = Counter(name for name, _, _ in stores())
    return [
        f"{name}: {want[name]} stores, {have[name, side]} points {side}"
        for name in want
        for side in ("before", "after")
        if have[name, side] < want[name] or (name.endswith(".c") and have[name, side] != want[name])
    ]


if __name__ == "__main__":
    for at in stores():
        print("{}:{} {}".format(*at))
    for at in stray():
        print("STRAY {}:{} {}".format(*at))
