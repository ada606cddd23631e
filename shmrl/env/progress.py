"""How an episode gets on, told while it runs: a worker's side of deltas (`protocol.py` lists their keys)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmrl.wire import pack

if TYPE_CHECKING:
    from shmrl.env.model import Conversation, Model


class Progress:
    """Tells one episode's phases to `send`; texts: with the messages that came since.

    Example: progress = Progress(send, episode=3, texts=True); progress("scoring", model)
    """

    def __init__(self, send: Callable[[bytes], None], episode: int = 0, *, texts: bool = False) -> None:
        self._send, self._episode, self._texts = send, episode, texts
        self._told: dict[Conversation, int] = {}

    def __call__(self, phase: str, model: Model) -> None:
        delta: dict[str, Any] = {"phase": phase, "episode": self._episode}
        delta |= {"turns": model.turns, "tokens": model.num_tokens}
        if self._texts and model.current is not None:
            messages = model.current.messages
            delta["messages"] = messages[self._told.get(model.current, 0) :]
            self._told[model.current] = len(messages)
        self._send(pack(delta))
