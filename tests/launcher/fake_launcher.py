"""A launcher over fake roles, as a process of its own so that a test can signal and kill it.

argv: directory, then one role per argument as `name|flags|python code` (flags: f = final, d = drains, r = one restart).
Prints the outcome as its last line and exits with its code. Every tick appends to `ticks`, as the real one sweeps its
arena.
"""

import asyncio
import logging
import sys
from pathlib import Path

from shmrl.launcher.janitor import Janitor
from shmrl.launcher.roles import Role
from shmrl.launcher.supervisor import Supervisor

directory = Path(sys.argv[1])
logging.basicConfig(level="INFO", format="%(message)s")


def role(spec):
    name, flags, code = spec.split("|", 2)
    command = [sys.executable, "-c", code]
    log = directory / f"{name}.log"
    restarts = int("r" in flags)
    return Role(name, command, log, final="f" in flags, drains="d" in flags, restarts=restarts, again=["--again"])


def tick():
    if (directory / "raise").exists():
        raise RuntimeError("the tick raised")
    with (directory / "ticks").open("a") as file:
        file.write(".")


roles = [role(spec) for spec in sys.argv[2:]]
first = next((one for one in roles if one.name == "first"), None)
with Janitor(f"test-{directory.name}", directory / "janitor.log") as janitor:
    (directory / "janitor.pid").write_text(str(janitor.pid))
    janitor.tell(directory=str(directory / "sockets"), record=str(directory / "run.json"))
    supervisor = Supervisor(f"test-{directory.name}", janitor, tick)
    outcome = asyncio.run(supervisor.run(first, [one for one in roles if one != first]))
print(outcome, flush=True)
sys.exit(outcome.code)
