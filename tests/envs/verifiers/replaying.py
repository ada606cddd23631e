"""A recorded v1 episode once more: every model call of its graphs, through the endpoint, to a scripted engine."""

from contextlib import asynccontextmanager

import aiohttp

from shmrl.env.chat import chat_format
from shmrl.env.endpoint import SESSION, Endpoint
from shmrl.env.model import Model, ModelSpec
from shmrl.inference.client import EngineClient
from tests.support.fake_engine import FakeEngine
from tests.support.model_dir import IM_END


class ScriptedEngine(FakeEngine):
    """Samples what it is told to: `script` maps a prompt's ids to the ids of the reply."""

    def __init__(self):
        super().__init__()
        self.script = {}

    def choice(self, prompt, sampling, abort=False):
        self._next = self.script[tuple(prompt)]
        return super().choice(prompt, sampling, abort)

    def _draw(self, start, room, stop_id):
        return self._next, "stop"


class Replay:
    """`model` of the episode, `sessions` by trace id, as the adapter has them when verifiers is done."""

    def __init__(self, model, endpoint, engine, chat, http):
        self.model, self.sessions = model, {}
        self._endpoint, self._engine, self._chat, self._http = endpoint, engine, chat, http

    async def play(self, record):
        """All calls of all traces, in the order in which they were made."""
        for trace in record["traces"]:
            part = self.model.part(len(self.sessions))
            session = self.sessions[trace["id"]] = self._endpoint.open(trace["id"], part)
            for index, node in enumerate(trace["nodes"]):
                if node["sampled"]:
                    await self._call(trace, session, [wire(trace["nodes"][i]["message"]) for i in path(trace, index)])

    async def _call(self, trace, session, messages):
        *asked, answer = messages
        _, prompt = session.model._place([dict(message) for message in session.asked(asked)], None)
        self._engine.script[tuple(prompt)] = [*self._chat._ids(answer["content"]), IM_END]
        headers = {SESSION: trace["id"], "Authorization": f"Bearer {self._endpoint.key}"}
        async with self._http.post(
            f"{self._endpoint.url}/chat/completions", json={"messages": asked}, headers=headers
        ) as reply:
            message = (await reply.json())["choices"][0]["message"]
        assert message == answer


def path(trace, index):
    """Nodes from the root to this one."""
    parent = trace["nodes"][index].get("parent")
    return [*([] if parent is None else path(trace, parent)), index]


def wire(message):
    return {key: value for key, value in message.items() if value is not None}


@asynccontextmanager
async def replaying(spec, model_dir):
    """A `Replay` for one episode."""
    async with ScriptedEngine() as engine, Endpoint() as endpoint, EngineClient([engine.url]) as client:
        chat = chat_format(str(model_dir))
        model = Model(ModelSpec.from_wire(spec(urls=[engine.url], max_tokens=64)), chat, client)
        async with aiohttp.ClientSession() as http:
            yield Replay(model, endpoint, engine, chat, http)
