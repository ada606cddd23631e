"""The orchestrator: dispatches episodes, scores groups, ships steps by reference; one process, no torch.

`main(tree, resume) -> exit code` is the role's entry point.
"""

from shmrl.orchestrator.loop import main

__all__ = ["main"]
