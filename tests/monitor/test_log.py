"""Log lines carry the role of their process, as text or as JSON."""

import json
import subprocess
import sys

CODE = """
import logging
from shmrl.config.tables import Log
from shmrl.monitor.log import setup
setup("trainer:1", Log(level="info", json={json}))
log = logging.getLogger("shmrl.x")
log.debug("not shown")
log.info("step %d", 3)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("no luck")
"""


def lines(json_lines, **environment):
    command = [sys.executable, "-c", CODE.format(json=json_lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment or None)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text_lines_name_level_role_and_logger():
    first, second, *rest = lines(False)
    assert first[8:] == " I trainer:1 shmrl.x: step 3"
    assert second[8:] == " E trainer:1 shmrl.x: no luck"
    assert rest[-1] == "ZeroDivisionError: division by zero"


def test_json_lines_are_one_object_each_with_the_traceback_inside():
    first, second = map(json.loads, lines(True))
    assert (first["level"], first["role"], first["logger"], first["message"]) == (
        "info",
        "trainer:1",
        "shmrl.x",
        "step 3",
    )
    assert second["traceback"].endswith("ZeroDivisionError: division by zero")


def test_the_environment_sets_the_level():
    assert lines(False, SHMRL_LOG_LEVEL="debug")[0].endswith("not shown")
    assert len(lines(False, SHMRL_LOG_LEVEL="critical")) == 0
