"""Episodes end to end: a fake engine, a real server, a worker process, the arena, the client."""

from shmrl.payload import read_header, read_text, read_tokens
from tests.env.conftest import rollout


async def test_a_training_episode_comes_back_as_references(hosted, spec, arena):
    async with hosted("reverse-text", {"seed": 3}) as (client, _):
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec())
        assert result.success, result.error
        (sample,) = result.samples
        arena.adopt(sample.handles)
        assert sample.fields == ("routing", "head", "mask")
        assert sample.T == sample.R + 1
        assert read_text(arena, sample)[0] == {"role": "user", "content": task.data["text"]}
        assert len(read_tokens(arena, sample)) == sample.T
        assert read_header(arena, sample.handles[0]).meta["task"] == task.id
        arena.free(sample.handles)
        assert arena.stats()["blocks"] == 0
