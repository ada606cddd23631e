"""The live page: a run, going on or finished, in a browser. A process of its own that only reads.

`server` answers, `files` reads the run directory, `arena` the shared memory, `processes` /proc, and static/ is what
the browser gets. The launcher binds the page's socket (`listen`) and starts the process when somebody connects; alone
it is `shmrl page RUN_DIR`. No torch; nothing of the run waits for it, and nothing is ever written.
"""

from __future__ import annotations

from shmrl.monitor.page.listening import Listener, listen, missing

__all__ = ["Listener", "listen", "missing"]
