"""The first process inside a sandbox: limits the program, waits for it, ends with it, and so ends everything inside.

`python -I -S init.py REPORT_FD ORDER` as process 1 of a new pid namespace (`bwrap.py` starts it); standard library
alone. It forks the program, which gives up its uid and gets the rlimits before it starts. Started by root, this process
stays another uid than the program: neither its report nor its life is in the program's hands. When it exits, the kernel
kills whatever the program left behind.

ORDER is JSON: {"argv": [...], "uid": 1879048192 or null, "rlimits": {"AS": [soft, hard], ...}}. So is the report:
{"code": exit code or -signal, "left": whether processes outlived the program}, or {"error": why it did not start}.
"""

import json
import os
import resource
import sys
import time
from typing import Any

REAPING_S = 0.2
"""How long helpers of a program that has ended may take to end by themselves (multiprocessing has some)."""


def main(report: int, order: dict[str, Any]) -> None:
    """Run the program of `order`; write one report."""
    os.set_inheritable(report, False)
    ready, failed = os.pipe()  # closed by a successful exec
    child = os.fork()
    if child == 0:
        _become(order, failed)
    os.close(failed)
    error = os.read(ready, 4096).decode(errors="replace")
    code = _wait_for(child)
    facts = {"error": error} if error else {"code": code, "left": _others_stay()}
    os.write(report, json.dumps(facts).encode())


def _become(order: dict[str, Any], failed: int) -> None:
    """Turn this forked process into the program; never returns."""
    try:
        os.setsid()
        for name, (soft, hard) in order["rlimits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
        if order["uid"] is not None:
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])  # the last capabilities go with it
        os.chdir("/tmp")
        os.execv(order["argv"][0], order["argv"])
    except BaseException as error:
        os.write(failed, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _wait_for(child: int) -> int:
    """The program's exit code or -signal; orphans that end meanwhile are reaped."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _others_stay() -> bool:
    """Whether processes are left that do not end by themselves; all of them are children of process 1 now."""
    deadline = time.monotonic() + REAPING_S
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
