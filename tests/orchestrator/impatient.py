"""The orchestrator, to which a node is lost sooner: `python -m tests.orchestrator.impatient SECONDS FILE`."""

import sys
from pathlib import Path

from shmrl.config import load_run
from shmrl.monitor.log import setup
from shmrl.node import client
from shmrl.orchestrator import main

if __name__ == "__main__":
    seconds, file, *options = sys.argv[1:]
    client.PATIENCE_S = float(seconds)
    tree = load_run([Path(file)])
    setup("orchestrator", tree.log)
    sys.exit(main(tree, "--resume" in options))
