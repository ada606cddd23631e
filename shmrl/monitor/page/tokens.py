"""Token ids as text, for the rollout that somebody looks at. The tokenizer is loaded when the first one does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

CONTEXT = 4  # ids that are decoded before one: what a token is can depend on them (bytes of one character)


class Words:
    """Text of tokens, by the tokenizer of the run's model."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._tokenizer: Tokenizer | None = None

    def of(self, ids: Any, path: Path | None) -> list[str] | None:
        """One text per id, which together are the whole's; None without a tokenizer that can be read, or without ids.

        A character of several tokens is shown at its last one.
        """
        tokenizer = self._load(path)
        if tokenizer is None or not _are_ids(ids):
            return None
        texts, held = [], 0
        for at in range(len(ids)):
            text = tokenizer.decode(list(ids[at - held : at + 1]), skip_special_tokens=False)
            if text.endswith("\ufffd") and held < CONTEXT and at + 1 < len(ids):
                held += 1
                text = ""
            else:
                held = 0
            texts.append(text)
        return texts

    def _load(self, path: Path | None) -> Tokenizer | None:
        if path is None or path == self._path:
            return self._tokenizer
        from tokenizers import Tokenizer

        self._path = path
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # that is the type it raises
            log.warning("%s cannot be read, tokens are shown by number: %s", path, error)
            self._tokenizer = None
        return self._tokenizer


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(one) is int and 0 <= one < 1 << 32 for one in ids)
