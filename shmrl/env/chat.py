"""The chat side of a model directory: its tokenizer and its template, and how a conversation goes on by ids.

Used by `env.model` in the env workers; one `ChatFormat` per directory and process. Uses `tokenizers` and a sandboxed
jinja2, so that a worker needs no transformers. A template is text from a model directory: it has no access to Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shmrl.config.shape import read_shape
from shmrl.errors import EnvError

_PROBE = "\u241f"
"""Stands for an assistant's reply when the template is asked what surrounds one."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

Messages = Sequence[Mapping[str, Any]]


@lru_cache(maxsize=8)
def chat_format(directory: str) -> ChatFormat:
    """The format of a model directory, read once per process. EnvError names what is missing."""
    return ChatFormat(Path(directory))


class ChatFormat:
    """Rendering and tokenising for one model directory.

    Attributes:
        stop_ids: ids that end a turn. shape: layers, experts and vocabulary of the model.

    Example:
        >>> chat = chat_format("runs/run/weights/step_0")
        >>> prompt = chat.prompt([{"role": "user", "content": "abc"}])
        >>> more = chat.continuation(prompt + sampled, [{"role": "user", "content": "d"}])
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tokenizer = self._read("tokenizer.json", Tokenizer.from_str)
        settings = self._read("tokenizer_config.json", json.loads)
        config = self._read("config.json", json.loads)
        self._specials = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        self._template = _compile(_template_text(directory, settings))
        self.stop_ids = self._stop_ids(config)
        try:
            self.shape = read_shape(config)
        except KeyError as error:
            raise EnvError(f"{directory}: config.json has no {error}") from None

    def prompt(self, messages: Messages, tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of a conversation that starts here, up to where the assistant speaks."""
        return self._ids(self._render(messages, tools, add_generation_prompt=True))

    def continuation(self, ids: Sequence[int], new: Messages, tools: Sequence[Any] | None = None) -> list[int]:
        """The ids that follow `ids`, which end with an assistant's turn, when `new` messages come; only the new ones.

        What stands around a reply is learned from a probe conversation, because templates may rewrite old turns. If the
        turn was cut before its end token, that token comes first.
        """
        probe = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        before = self._render(probe, tools, add_generation_prompt=False)
        after = self._render([*probe, *new], tools, add_generation_prompt=True)
        closed = before.rindex(_PROBE) + len(_PROBE)
        if not after.startswith(before[:closed]):
            raise EnvError(
                f"{self.directory}: the chat template rewrites a turn when another follows; ids cannot go on"
            )
        tail = self._ids(after[closed:])
        if ids and tail and ids[-1] == tail[0] and ids[-1] in self.stop_ids:
            return tail[1:]
        return tail

    def reply_ids(self, text: str) -> list[int]:
        """Ids of an assistant's turn as the model would have sampled it, end token included."""
        return [*self._ids(text), *self._turn_end()]

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _turn_end(self) -> list[int]:
        """The one id that ends an assistant's turn: the first after a reply in the template, if it is a stop id."""
        probe = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        rendered = self._render(probe, None, add_generation_prompt=False)
        tail = self._ids(rendered[rendered.rindex(_PROBE) + len(_PROBE) :])
        return tail[:1] if tail and tail[0] in self.stop_ids else self.stop_ids[:1]

    def _stop_ids(self, config: Mapping[str, Any]) -> list[int]:
        """What the engine stops at: generation_config.json's eos ids, else config.json's."""
        path = self.directory / "generation_config.json"
        generation = json.loads(path.read_text()) if path.is_file() else {}
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [eos]
        if not ids or any(not isinstance(i, int) for i in ids):
            raise EnvError(
                f"{self.directory}: no eos_token_id in generation_config.json or config.json (found {eos!r})"
            )
        return list(ids)

    def _render(self, messages: Messages, tools: Sequence[Any] | None, *, add_generation_prompt: bool) -> str:
        said = [_with_arguments(message) for message in messages]
        values = {"messages": said, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._template.render(**values, **self._specials))
        except TemplateError as error:
            raise EnvError(f"{self.directory}: chat template: {type(error).__name__}: {error}") from None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _read(self, name: str, parse: Callable[[str], Any]) -> Any:
        try:
            return parse((self.directory / name).read_text())
        except OSError as error:
            raise EnvError(
                f"{self.directory}: {name}: {error.strerror}; the env workers need the model's directory"
            ) from None
        except Exception as error:  # that is the type the tokenizer raises
            raise EnvError(f"{self.directory}: {name} cannot be read: {error}") from None


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its calls' arguments as maps: templates put them into JSON, where OpenAI's clients have text."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_map(call) for call in message["tool_calls"]]}


def _with_map(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, KeyError, TypeError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def parse_tool_calls(text: str, known: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """(content without them, OpenAI-style tool calls) of `<tool_call>{"name", "arguments"}</tool_call>` blocks.

    known: calls of the conversation so far; ids go on from there. A block that is no such JSON stays text: the
    environment sees what the model wrote.
    """
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError):
            return match[0]
        calls.append({"id": f"call_{known + len(calls)}", "type": "function", "function": function})
        return ""

    content = _TOOL_CALL.sub(take, text)
    return content.strip() if calls else text, calls


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value or ""


def _template_text(directory: Path, settings: Mapping[str, Any]) -> str:
    """chat_template.jinja, or tokenizer_config.json's chat_template (text, or a list of named ones)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    if not template:
        raise EnvError(f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return str(template)


def _compile(text: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def _raise(message: str) -> None:
    raise TemplateError(message)
