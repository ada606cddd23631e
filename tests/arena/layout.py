"""Where things are in a ctl file, for tests that change it behind the arena's back: asked of csrc/arena_layout.h."""

import functools
import subprocess
import tempfile
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
HEADER = (
    "boot", "lock", "free_slot", "bin_map", "bins", "cell_pages", "shares", "share_count",
    "events_off", "pending_off", "pages_off", "blocks_off",
)  # fmt: skip
PROBE = """
#include "arena_layout.h"
#include <stdio.h>
int main(void) {{
    {lines}
    printf("header %zu\\nprocess %zu\\npage %zu\\nblock %zu\\n", sizeof(srl_header), sizeof(srl_process),
           sizeof(srl_page), sizeof(srl_block));
}}
"""
PROCESSES_OFF = 4096  # the header is one page


@functools.cache
def _probed():
    """{field of the header: its offset; "header", "process", "page", "block": sizeof}."""
    lines = "\n".join(f'printf("{name} %zu\\n", offsetof(srl_header, {name}));' for name in HEADER)
    with tempfile.TemporaryDirectory() as directory:
        source, probe = Path(directory, "probe.c"), Path(directory, "probe")
        source.write_text(PROBE.format(lines=lines))
        subprocess.run(["gcc", f"-I{CSRC}", source, "-o", probe], check=True)
        said = subprocess.check_output([probe], text=True)
    return {name: int(at) for name, at in (line.split() for line in said.splitlines())}


def at(name):
    """Offset of a field of the header."""
    return _probed()[name]


def size(name):
    """sizeof of a header, process, page or block."""
    return _probed()[name]


def block(ctl, slot):
    """Offset of a descriptor: word, offset, nbytes, nonce, birth_ns, span, 8 bytes each, and so on."""
    return table(ctl, "blocks") + slot * _probed()["block"]


def table(ctl, name):
    """Where a table begins: events, pending, pages or blocks."""
    return int.from_bytes(ctl[at(f"{name}_off") :][:8], "little")


def regions(ctl, processes=3, pages=32, blocks=24):
    """[(start, stop)] of the parts that are in use; the header and the blocks twice, as they hold the most."""
    size = _probed()
    header, first_block = (0, size["header"]), table(ctl, "blocks")
    blocks = (first_block, first_block + blocks * size["block"])
    return [
        header,
        header,
        (PROCESSES_OFF, PROCESSES_OFF + processes * size["process"]),
        (table(ctl, "events"), table(ctl, "events") + 2048),
        (table(ctl, "pending"), table(ctl, "pending") + 64),
        (table(ctl, "pages"), table(ctl, "pages") + pages * size["page"]),
        blocks,
        blocks,
    ]
