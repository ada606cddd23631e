"""SIGKILL at every numbered crash point, in four roles; every store has its points; seeded mutants are found."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.arena import stores

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
POINTS = ["-DSRL_CRASH_POINTS", "-O1"]

# Points no trial can reach, and why.
UNREACHED = {
    ("srl_format", 4),  # a creator that dies: nobody is attached, the files are garbage (test_files.py)
    ("try_once", 2),  # a takeover that finds contradictions lets go again: needs corruption, not a crash
}


def build(directory, driver, flags, sources=CSRC):
    """Compiles tests/arena/<driver>.c with the C core of `sources` -> the binary."""
    out = directory / f"{driver}-{len(list(directory.iterdir()))}"
    files = [Path(__file__).with_name(f"{driver}.c"), *sorted(sources.glob("arena_*.c"))]
    subprocess.run(["gcc", *FLAGS, *flags, f"-I{sources}", "-o", out, *files, "-lpthread"], check=True)
    return out


def run(binary, *arguments, timeout=170):
    """(exit code, lines of its output)."""
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("crashes"), "crash_driver", POINTS)


def killed(lines):
    """Number of kills in a run without faults, all reachable points among them."""
    summary = re.fullmatch(r"kills=(\d+) rounds=\d+ faults=0", lines[0])
    assert summary, "\n".join(lines[:20])
    never = [line.split()[1] for line in lines[1:]]
    assert {(name, never.count(name)) for name in never} == UNREACHED
    return int(summary[1])


def test_every_store_has_a_point_on_either_side(driver):
    assert len(stores.stores()) > 100
    assert stores.stray() == []
    assert stores.missing(run(driver, "points")[1]) == []


def test_a_store_without_points_is_noticed(driver, monkeypatch):
    points = run(driver, "points")[1]
    assert stores.missing(points[1:]) != []
    text = {"arena_x.c": "a->h->used_bytes += 1;\nmemset(a->pages, 0, 9);\nb->reserved++;\nint x = b->span;\n*b = c;\n"}
    monkeypatch.setattr(stores, "sources", lambda: text)
    assert [target for _, _, target in stores.stray()] == ["a->h->used_bytes", "*a->pages", "b->reserved", "*b"]


def test_thousands_of_kills_leave_nothing(driver):
    code, lines = run(driver, "kill", 1, 2000)
    assert (code, killed(lines) >= 2000) == (0, True)


@pytest.mark.parametrize("mode", ["fork", "undo"])
def test_scheduled_by_hand(driver, mode):
    assert run(driver, mode) == (0, [])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_thousand_kills_leave_nothing(driver, seed):
    code, lines = run(driver, "kill", seed, 100_000, timeout=1700)
    assert (code, killed(lines) >= 100_000) == (0, True)


# ------------------------------------------------------------------------------------------------------------- mutants

FREED = "    srl_store_sc(&b->word, SRL_WORD(SRL_GEN(w) + 1, SRL_FREE, 0, 0));\n"
WRITING = "    srl_store_sc(&b->word, SRL_WORD(r->generation, SRL_WRITING, r->spill ? SRL_SPILLED : 0, a->self));\n"
DROPPED = "    srl_drop_spilled(a, b, w);\n"
GIVEN = (
    "    if (srl_span_give(a, b, SRL_OWNER(w)))\n"
    "        return; /* a descriptor that was scribbled on: fsck shows it, nobody gets its bytes */\n"
)
LISTED = "    srl_store_relaxed(&b->offset, a->h->free_slot);\n"

# name: (file, text, what replaces it, driver, flags, mode, what it says)
MUTANTS = {
    "seal without release": (
        "arena_block.c",
        "if (srl_cas_sc(&b->word, w, SRL_WORD(gen, SRL_READY, sealed, a->self))) {",
        "__atomic_store_n(&b->word, SRL_WORD(gen, SRL_READY, sealed, a->self), __ATOMIC_RELAXED);\n        {",
        ("core_driver", ["-O1", "-fsanitize=thread"], ["publish"], "data race"),
    ),
    "no generation bump": (
        "arena_block.c",
        "srl_store_sc(&b->word, SRL_WORD(SRL_GEN(w) + 1, SRL_FREE, 0, 0));",
        "srl_store_sc(&b->word, SRL_WORD(SRL_GEN(w), SRL_FREE, 0, 0));",
        ("crash_driver", POINTS, ["one", "free"], "free in the generation it was used in"),
    ),
    "undo without finish": (
        "arena_block.c",
        "drop_bit(a, b); /* a full release",
        "srl_and_sc(word_of_bit(b->holders, a->self), ~mask_of_bit(a->self)); /* a full release",
        ("crash_driver", POINTS, ["undo"], "came too late left the block"),
    ),
    "no fork detach": (
        "arena_live.c",
        "        close(live->fd);\n",
        "",
        ("crash_driver", POINTS, ["fork"], "a grandchild keeps a dead process alive"),
    ),
    "lock never probed": (
        "arena_lock.c",
        "int rc = try_once(a, WAITERS, true);",
        "int rc = try_once(a, WAITERS, false);",
        ("crash_driver", POINTS, ["one", "free"], "the lock of a dead process was never taken over"),
    ),
    "sweep of own blocks only": (
        "arena_sweep.c",
        "    case SRL_RETIRED:\n",
        "    case SRL_RETIRED:\n        if (SRL_OWNER(w) != p)\n            return true;\n",
        ("crash_driver", POINTS, ["one", "release-last"], "retired, held by nobody, and not freed"),
    ),
    "done not completed by the sweep": (
        "arena_sweep.c",
        "if (flags & SRL_SHIPPED && srl_done_complete(b))",
        "if (0 && flags)",
        ("crash_driver", POINTS, ["one", "done-last"], "every reader is done, and the block is still ready"),
    ),
    "claim without sweep": (
        "arena_live.c",
        "if (srl_load_sc(&a->processes[p].used)) /* dirty",
        "if (0) /* dirty",
        ("crash_driver", POINTS, ["recover"], "a child failed on its own"),
    ),
    "free list before the word": (
        "arena_block.c",
        FREED + LISTED,
        LISTED + FREED,
        ("crash_driver", POINTS, ["one", "put-free-cycle"], "the lock of a dead process was never taken over"),
    ),
    "takeover without rebuild": (
        "arena_lock.c",
        "int rc = srl_rebuild(a);",
        "int rc = 0;",
        ("crash_driver", POINTS, ["one", "put"], "!= committed"),
    ),
    "word before the file": (
        "arena_block.c",
        DROPPED + GIVEN + FREED,
        GIVEN + FREED + DROPPED,
        ("crash_driver", POINTS, ["recover"], "a file without its block"),
    ),
    "rebuild leaves the file": (
        "arena_alloc.c",
        "            srl_drop_spilled(a, b, w);\n",
        "",
        ("crash_driver", POINTS, ["recover"], "a file without its block"),
    ),
    "seal forgets the file": (
        "arena_block.c",
        "(SRL_FLAGS(w) & SRL_SPILLED) | (checked ? 0 : SRL_UNCHECKED);",
        "checked ? 0 : SRL_UNCHECKED;",
        ("crash_driver", POINTS, ["one", "put-file"], "in a span of 0"),
    ),
    "rebuild does not recount shares": (
        "arena_alloc.c",
        "    count_used(a, b->share, b->span);\n",
        "    srl_store_relaxed(&a->h->used_bytes, a->h->used_bytes + b->span);\n",
        ("crash_driver", POINTS, ["one", "put"], "its blocks own"),
    ),
    "rebuild counts shares twice": (
        "arena_alloc.c",
        "    srl_share_clear(a);\n",
        "",
        ("crash_driver", POINTS, ["one", "put"], "its blocks own"),
    ),
    "free forgets its share": (
        "arena_alloc.c",
        "    count_used(a, share, -span);\n",
        "    srl_store_relaxed(&a->h->used_bytes, a->h->used_bytes - span);\n",
        ("crash_driver", POINTS, ["one", "free"], "its blocks own"),
    ),
    "word before descriptor": (
        "arena_block.c",
        "    describe(b, r, span);\n" + WRITING,
        WRITING + "    describe(b, r, span);\n",
        ("crash_driver", POINTS, ["one", "put"], ""),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, tmp_path):
    file, text, instead, (which, flags, mode, says) = MUTANTS[name]
    for path in CSRC.glob("arena_*"):
        source = path.read_text()
        if path.name == file:
            assert source.count(text) == 1, f"the mutant {name!r} no longer finds its place in {file}"
            source = source.replace(text, instead)
        (tmp_path / path.name).write_text(source)
    binaries = tmp_path / "binaries"
    binaries.mkdir()
    binary = build(binaries, which, [*flags, "-Wno-error"], tmp_path)
    code, lines = run(binary, *mode)
    assert code != 0, "the mutant was not noticed"
    assert any(says in line for line in lines), "\n".join(lines[:10])
