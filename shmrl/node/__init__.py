"""What a host gives a run, and its blocks to other hosts.

`host` has the arena, the token and the socket directory, `ports` asks for free ports. Between nodes: the server
(`server`, `service`), `fetch` (`transfer`, `client`, `http`), one copy per node (`copies`), a rank's view (`blocks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmrl.node.transfer import fetch as fetch

__all__ = ["fetch"]


def __getattr__(name: str) -> object:
    if name != "fetch":
        raise AttributeError(f"module 'shmrl.node' has no attribute {name!r}")
    from shmrl.node.transfer import fetch

    globals()[name] = fetch
    return fetch
