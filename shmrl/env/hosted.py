"""Server mode: an environment object that puts a server of itself beside the process that holds it.

The server's workers make environments of their own, of the same class with the same arguments: `Hosted` remembers what
it was made with. So the class has to be importable, which one in a script's `__main__` is not.
"""

from __future__ import annotations

import inspect
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from shmrl.errors import EnvError

if TYPE_CHECKING:
    from shmrl.config import EnvServerConfig
    from shmrl.env.client import EnvClient


class Hosted:
    """What rollout and session environments have in common: `start_server` and `stop_server`."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _hosting: AsyncExitStack | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._made_with = args, kwargs
        return made

    async def start_server(self, *, config: EnvServerConfig | None = None) -> EnvClient:
        """Serve this environment in a process of its own, until `stop_server` or the end of this one; a connected
        client. Its `address` and `token` are what another `EnvClient` needs.

        config: everything else (workers, limits, arena, address...); without an arena's address the server makes its
        own. Its env is not used.

        Raises EnvError where it serves already, or its class or arguments cannot be given to another process;
        ProcessFailed with the server's last lines, TasksetError if the environment cannot load there, ConfigError
        where that needs another configuration.

        Example: client = await env.start_server(); print(await client.health()); await env.stop_server()
        """
        from shmrl.env.sidecar import serve_sidecar

        if self._hosting is not None:
            raise EnvError(f"{type(self).__name__} serves already: stop_server() comes first")
        env_id, arguments = self._named(), self._arguments()
        stack = AsyncExitStack()
        client = await stack.enter_async_context(serve_sidecar(env_id, arguments, config=config))
        self._hosting = stack
        return client

    async def stop_server(self) -> None:
        """End the server, its workers and its arena; does nothing where there is none."""
        stack, self._hosting = self._hosting, None
        if stack is not None:
            await stack.aclose()

    def _named(self) -> str:
        kind = type(self)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise EnvError(
                f"{kind.__qualname__} of {kind.__module__} cannot be imported by a server's workers: put the class "
                "into a module, at its top level"
            )
        return f"{kind.__module__}:{kind.__qualname__}"

    def _arguments(self) -> dict[str, Any]:
        """As keywords, as `env.args` has them."""
        args, kwargs = self._made_with
        bound = inspect.signature(type(self)).bind(*args, **kwargs)
        keywords: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) and value:
                raise EnvError(f"{type(self).__name__}: argument {name} has no keyword: a server cannot be given it")
            keywords |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return keywords
