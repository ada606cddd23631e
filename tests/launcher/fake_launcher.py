"""A launcher over fake roles, as a process of its own so that a test can signal and kill it.

argv: directory, then one role per argument as `name|flags|python code` (flags: f = final, d = drains, r = a restart,
l = on demand: its socket is its first argument, and its port in DIR/name.port; s = spare; a = after the others,
when the file `later` is there, and never when it says "no"). With a spare role the run ends when the file `told` is
there. A trainer may go on after a failure for as long as the file `flushing` is there. Prints the outcome as its last
line and exits with its code. Every tick appends to `ticks`, as the real one sweeps its arena.
"""

import asyncio
import logging
import socket
import sys
from pathlib import Path

from shmrl.errors import RunError
from shmrl.launcher.janitor import Janitor
from shmrl.launcher.roles import Role
from shmrl.launcher.supervisor import Outcome, Rules, Supervisor
from tests.support.clock import wait_until

directory = Path(sys.argv[1])
logging.basicConfig(level="INFO", format="%(message)s")


def role(spec):
    name, flags, code = spec.split("|", 2)
    command = [sys.executable, "-c", code]
    log = directory / f"{name}.log"
    restarts = int("r" in flags)
    more = {}
    if "l" in flags:
        more["socket"] = listening = socket.create_server(("127.0.0.1", 0))
        command.append(str(listening.fileno()))
        (directory / f"{name}.port").write_text(str(listening.getsockname()[1]))
    return Role(
        name, command, log, final="f" in flags, drains="d" in flags, restarts=restarts, again=["--again"], **more
    )


def tick():
    if (directory / "raise").exists():
        raise RuntimeError("the tick raised")
    with (directory / "ticks").open("a") as file:
        file.write(".")
    if (directory / "drain").exists():
        supervisor.drain("runs/x/drain")
    return Outcome(0, "finished", "told") if (directory / "told").exists() else None


async def later():
    await asyncio.to_thread(wait_until, (directory / "later").exists, what="later")
    if (directory / "later").read_text() == "no":
        raise RunError("nothing comes")
    return [role(spec) for spec in specs if "a" in flags(spec)]


def flags(spec):
    return spec.split("|", 2)[1]


specs = sys.argv[2:]
roles = [role(spec) for spec in specs if "a" not in flags(spec)]
spare = {spec.partition("|")[0] for spec in specs if "s" in flags(spec)}
rules = Rules(
    spare=lambda role: role.name in spare,
    told=bool(spare),
    ending=lambda outcome: (directory / "ending").write_text(str(outcome)),
    flush_s=10,
    flushing=lambda _: (directory / "flushing").exists(),
)
first = next((one for one in roles if one.name == "first"), None)
with Janitor(f"test-{directory.name}", directory / "janitor.log") as janitor:
    (directory / "janitor.pid").write_text(str(janitor.pid))
    janitor.tell(directory=str(directory / "sockets"), record=str(directory / "run.json"))
    supervisor = Supervisor(f"test-{directory.name}", janitor, tick, rules)
    then = later if any("a" in flags(spec) for spec in specs) else None
    outcome = asyncio.run(supervisor.run(first, [one for one in roles if one != first], then))
print(outcome, flush=True)
sys.exit(outcome.code)
