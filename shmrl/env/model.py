"""The model as an environment's author sees it: an OpenAI-style client that records what the trainer needs.

One `Model` per episode, in an env worker. Prompts go to the engine as token ids; a call whose messages continue a
recorded conversation continues its ids, so that what is trained is exactly what was sampled. Any other call starts
another branch. Token ids, log-probabilities, routing, heads and masks are collected by a `BranchBuilder` per branch.
What grows with the number of tokens (tokenising, decoding of arrays) is done by threads: the event loop stays free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from shmrl.env.chat import ChatFormat, parse_tool_calls
from shmrl.env.protocol import FIELDS
from shmrl.env.threads import in_turn
from shmrl.errors import EngineError, EnvError, ProtocolError
from shmrl.payload import BranchBuilder
from shmrl.payload.sharing import Opening

if TYPE_CHECKING:
    from shmrl.inference.answers import Generation
    from shmrl.payload import Branch

MAX_ABORTS = 64
"""How often one reply may be aborted and resumed (an engine aborts at most once per weight update)."""


class Engine(Protocol):
    """What `Model` needs of `shmrl.inference.client.EngineClient`."""

    async def generate(
        self,
        token_ids: list[int],
        sampling: dict[str, Any],
        *,
        routed_experts_prompt_start: int,
        cache_salt: str | None,
        derive_masks: bool,
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The `model` map of a request: which engine and tokenizer, how to sample, what to capture.

    Attributes:
        urls: engines that serve the policy. near: those of them on the same node, which are asked first.
        name: what the policy is called. tokenizer: model directory.
        sampling: temperature, top_p, top_k, min_p, max_tokens. version: the policy version at dispatch.
        fields: what to capture: routing, head, mask. head: width of the captured top-k. max_model_len: tokens.
        logprobs_mode: what the engine returns: "processed" (after temperature and truncation) or "raw".
        derive_masks: the engine returns no sampling masks; they are read off its log-probabilities.
        timeout_s: deadline of one request to the engine, retries included.
    """

    urls: tuple[str, ...]
    tokenizer: str
    sampling: Mapping[str, Any]
    near: tuple[str, ...] = ()
    name: str = "policy"
    version: int = 0
    cache_salt: str | None = None
    fields: tuple[str, ...] = ()
    head: int = 0
    max_model_len: int = 1024
    logprobs_mode: str = "processed"
    derive_masks: bool = False
    timeout_s: float = 600.0

    @classmethod
    def from_wire(cls, raw: Any) -> ModelSpec:
        """The spec of a request's map; ProtocolError names keys that are missing or unknown."""
        if not isinstance(raw, Mapping):
            raise ProtocolError(f"model: a map was expected, not {type(raw).__name__}")
        missing = sorted({"urls", "tokenizer", "sampling"} - raw.keys())
        unknown = sorted(map(str, raw.keys() - cls.__dataclass_fields__.keys()))
        if missing or unknown:
            raise ProtocolError(f"model: missing {missing}, unknown {unknown}")
        if not isinstance(raw["sampling"], Mapping) or not isinstance(raw["sampling"].get("max_tokens"), int):
            raise ProtocolError(f"model: sampling is a map with max_tokens, not {raw['sampling']!r}"[:300])
        if not set(raw.get("fields", ())) <= set(FIELDS):
            raise ProtocolError(f"model: fields {raw['fields']!r}: there are {', '.join(FIELDS)}")
        spec = cls(**raw)
        return replace(
            spec,
            urls=tuple(spec.urls),
            near=tuple(spec.near),
            fields=tuple(spec.fields),
            logprobs_mode=spec.logprobs_mode.removesuffix("_logprobs"),
        )


class Message(dict[str, Any]):
    """An assistant message: a plain dict (append it to `messages`) whose keys can be read as attributes, those of its
    tool calls too: message.tool_calls[0].function.arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _readable(self.get(name))


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(one) for one in value]
    return Message(value) if type(value) is dict else value


@dataclass(frozen=True, slots=True)
class Choice:
    message: Message
    finish_reason: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The part of OpenAI's ChatCompletion that environments read; usage counts tokens."""

    choices: tuple[Choice, ...]
    usage: dict[str, int]
    model: str = ""


@dataclass(slots=True, eq=False)
class Conversation:
    """One branch while it runs. `turns` are the places where it can go on: (messages up to there, ids up to there).

    busy: a reply is being generated at its end; another call from the same place becomes a branch.
    """

    builder: BranchBuilder
    busy: bool = False
    turns: list[tuple[list[dict[str, Any]], int]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.turns[-1][0] if self.turns else []


class Model:
    """The client handed to `rollout`.

    Attributes:
        chat.completions.create: one call of the model. turns: calls that generated something.
        limit: which limit keeps a further call from generating: "length" (context full), "max_turns", or "".
        exhausted: whether there is one. stop_reason: how the last call ended: "stop", "length" or "max_turns".

    Example: reply = await model.chat.completions.create(messages=[{"role": "user", "content": "abc"}])
    """

    def __init__(
        self, spec: ModelSpec, chat: ChatFormat, engine: Engine, *, seed: int = 0, max_turns: int | None = None
    ) -> None:
        self.spec, self._format, self._engine, self._seed, self._max_turns = spec, chat, engine, seed, max_turns
        self.conversations: list[Conversation] = []
        self.current: Conversation | None = None  # the one that grew last
        self.on_progress: Callable[[str, Model], None] | None = None  # told when a turn begins, and when it is there
        self.turns = self.num_tokens = self._calls = self._length = 0
        self.stop_reason = "stop"
        self.chat = self
        self.completions = self

    @property
    def limit(self) -> str:
        if self._length >= self.spec.max_model_len:
            return "length"
        return "max_turns" if self._max_turns is not None and self.turns >= self._max_turns else ""

    @property
    def exhausted(self) -> bool:
        return bool(self.limit)

    async def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The reply's text: `create` for environments that need no more."""
        return str((await self.create(messages=messages)).choices[0].message["content"])

    async def create(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        **others: Any,
    ) -> Completion:
        """One assistant turn. finish_reason is "stop", "tool_calls" or "length" (empty, if the model is exhausted).

        Args: messages: the whole conversation. tools: OpenAI's definitions, which the model's chat template shows it;
        then the message has the `tool_calls` that it made. max_tokens: at most the source's own. model: there is one,
        whatever it is called here. How it samples is the source's to say: other arguments are refused.
        Raises EngineError, EnvError, PayloadError: the episode fails with it unless the environment handles it.
        """
        if others:
            raise EnvError(f"{', '.join(others)}: no argument here; how a model samples is in its source's [sampling]")
        asked = [_plain(message) for message in messages]
        if max_tokens is not None and max_tokens < 1:
            raise EnvError(f"max_tokens = {max_tokens}: a reply has at least one token")
        conversation, prompt = await in_turn(self._place, asked, tools)
        self._length = len(prompt)
        if self.exhausted:
            self.stop_reason = self.limit
            return self._completion(Message(role="assistant", content=""), "length", len(prompt), 0)
        if conversation is None or conversation.busy or not conversation.builder.extends(prompt):
            conversation = Conversation(self._builder())
        limits = (max_tokens, self.spec.sampling["max_tokens"], self.spec.max_model_len - len(prompt))
        room = min(limit for limit in limits if limit is not None)
        conversation.busy = True
        self._tell("model")
        try:
            ids, self.stop_reason = await self._reply(conversation, asked, prompt, room)
        finally:
            conversation.busy = False
        message = self._message(ids, tools, sum(len(said.get("tool_calls", ())) for said in asked))
        if ids:
            self._record(conversation, [*asked, dict(message)], len(prompt) + len(ids), len(ids))
        self._tell("environment")
        finish = "tool_calls" if message.get("tool_calls") else self.stop_reason
        return self._completion(message, finish, len(prompt), len(ids))

    def _tell(self, phase: str) -> None:
        if self.on_progress is not None:
            self.on_progress(phase, self)

    def _record(self, conversation: Conversation, messages: list[dict[str, Any]], length: int, sampled: int) -> None:
        if conversation not in self.conversations:
            self.conversations.append(conversation)
        conversation.turns.append((messages, length))
        self.current = conversation
        self.turns += 1
        self.num_tokens += sampled
        self._length = length

    def part(self, number: int) -> Model:
        """A model for one of several agents of this episode: other seeds, its own branches and count of turns."""
        return Model(
            self.spec, self._format, self._engine, seed=_seed(f"{self._seed}/{number}"), max_turns=self._max_turns
        )

    def join(self, part: Model) -> None:
        """Make the branches of a part this episode's."""
        self.conversations += part.conversations
        self.turns += part.turns
        self.num_tokens += part.num_tokens
        self.stop_reason = part.stop_reason

    def branches(self, meta: Mapping[str, Any]) -> list[Branch]:
        """The finished branches in the order they began; `meta` goes into every header."""
        first, last = self.versions
        sampling = self.spec.sampling
        common = {
            "logprobs_mode": self.spec.logprobs_mode,
            "temperature": float(sampling.get("temperature", 1.0)),
            **meta,
        }
        if "mask" in self.spec.fields:  # else nobody replays the truncation, and it must not look as if one could
            common |= {key: sampling[key] for key in ("top_p", "top_k", "min_p") if key in sampling}
        if not any(conversation.builder.versions for conversation in self.conversations):  # an engine without labels
            common |= {"version_start": first, "version_end": last}
        return [
            conversation.builder.branch({**common, "branch": index}, conversation.messages)
            for index, conversation in enumerate(self.conversations)
        ]

    def openings(self) -> dict[Hashable, Opening]:
        """What the branches begin with, where they begin with anything, by (this model, index in `branches`)."""
        found = [conversation.builder.opening() for conversation in self.conversations]
        return {(self, index): opening for index, opening in enumerate(found) if opening is not None}

    @property
    def versions(self) -> tuple[int, int]:
        """Policy versions at the first and the last generated token; the dispatched version if there is none."""
        seen = [version for conversation in self.conversations for version in conversation.builder.versions]
        return (min(seen), max(seen)) if seen else (self.spec.version, self.spec.version)

    # ------------------------------------------------------------------------------------- where a call belongs

    def _place(self, asked: list[dict[str, Any]], tools: Sequence[Any] | None) -> tuple[Conversation | None, list[int]]:
        """Prompt ids, and the conversation with the longest beginning of these messages (not necessarily all of it)."""
        best: tuple[Conversation, int, int] | None = None
        for conversation in self.conversations:
            for known, length in conversation.turns:
                if len(known) < len(asked) and asked[: len(known)] == known and (best is None or len(known) > best[1]):
                    best = (conversation, len(known), length)
        if best is None:
            return None, self._format.prompt(asked, tools)
        conversation, count, length = best
        ids = conversation.builder.tokens[:length]
        return conversation, ids + self._format.continuation(ids, asked[count:], tools)

    def _builder(self) -> BranchBuilder:
        fields, chat = self.spec.fields, self._format
        head_k = self.spec.head if "head" in fields else 0
        captured: dict[str, Any] = {"head_k": head_k, "mask": "mask" in fields, "vocab": chat.shape.vocab}
        if "routing" not in fields:
            return BranchBuilder(**captured)
        if not chat.shape.experts:
            raise EnvError(
                f"{chat.directory}: routing is to be captured, but config.json names no experts: a dense model"
            )
        return BranchBuilder(
            num_experts=chat.shape.experts,
            layers=chat.shape.moe_layers,
            decoder_layers=chat.shape.layers,
            top_k=chat.shape.top_k,
            **captured,
        )

    # ------------------------------------------------------------------------------------- what the engine says

    async def _reply(
        self, conversation: Conversation, asked: list[dict[str, Any]], prompt: list[int], room: int
    ) -> tuple[list[int], str]:
        """Sampled ids of one turn and why it ended; an aborted request goes on where it stopped."""
        ids: list[int] = []
        for _ in range(MAX_ABORTS):
            answer = await self._engine.generate(
                prompt + ids,
                self._sampling(room - len(ids)),
                routed_experts_prompt_start=conversation.builder.covered,
                cache_salt=self.spec.cache_salt,
                derive_masks=self.spec.derive_masks and "mask" in self.spec.fields,
            )
            await in_turn(conversation.builder.add_turn, prompt + ids, answer)
            ids += answer.token_ids
            if answer.finish_reason != "abort" or len(ids) >= room:
                return ids, "length" if answer.finish_reason in ("abort", "length") else "stop"
        raise EngineError(f"{self.spec.urls}: a reply was aborted {MAX_ABORTS} times")

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        """Engine parameters of the next request; every request of an episode has its own seed."""
        self._calls += 1
        return {
            **self.spec.sampling,
            "max_tokens": max_tokens,
            "seed": _seed(f"{self._seed}/{self._calls}"),
            "logprobs": self.spec.head if "head" in self.spec.fields else 0,
            "stop_token_ids": self._format.stop_ids,
        }

    def _message(self, ids: Sequence[int], tools: Sequence[Any] | None, calls_before: int) -> Message:
        text = self._format.text(ids)
        if not tools:
            return Message(role="assistant", content=text)
        content, calls = parse_tool_calls(text, calls_before)
        return Message(role="assistant", content=content, **({"tool_calls": calls} if calls else {}))

    def _completion(self, message: Message, finish: str, prompt: int, sampled: int) -> Completion:
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return Completion((Choice(message, finish),), usage, self.spec.name)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What `BranchBuilder` reads of an answer that nobody sampled: ids with log-probability 0, nothing captured."""

    token_ids: list[int]
    version: int
    top_logprobs: None = None
    routed_experts: None = None
    sampling_mask: None = None

    @property
    def logprobs(self) -> list[float]:
        return [0.0] * len(self.token_ids)

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]:
        return [(self.version, 0, len(self.token_ids))]


class ScriptedModel(Model):
    """The model of a supervised warm-up: it says what `demonstrate(messages)` says; only tokens are recorded."""

    def __init__(
        self,
        spec: ModelSpec,
        chat: ChatFormat,
        demonstrate: Callable[[list[dict[str, Any]]], str],
        *,
        max_turns: int | None = None,
    ) -> None:
        super().__init__(replace(spec, fields=(), head=0), chat, _NoEngine(), max_turns=max_turns)
        self._demonstrate = demonstrate

    async def _reply(
        self, conversation: Conversation, asked: list[dict[str, Any]], prompt: list[int], room: int
    ) -> tuple[list[int], str]:
        ids = self._format.reply_ids(self._demonstrate(asked))[: self.spec.max_model_len - len(prompt)]
        conversation.builder.add_turn(prompt, Demonstration(ids, self.spec.version))
        return ids, "stop"


class _NoEngine:
    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        raise AssertionError("a scripted model asks no engine")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=6).digest(), "little")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a plain dict without absent values, so that what was recorded and what is asked compare equal."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise EnvError(f"a message is a mapping with a role and a content, not {message!r}")
    return {str(key): value for key, value in message.items() if value is not None}
