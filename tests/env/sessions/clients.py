"""Other people's clients against a server of ours: run by their own interpreters, which know nothing of shmrl.

    python clients.py openenv | agilerl URL PLACES      prints one JSON object; the server has PLACES places

All places are taken at once, in two groups that share a seed each; one more client is refused and says why.
"""

import asyncio
import importlib.metadata
import json
import sys
import threading


async def openenv(url, places):
    from openenv import GenericEnvClient

    clients = [GenericEnvClient(base_url=url) for _ in range(places)]
    await asyncio.gather(*(client.connect() for client in clients))
    seeds = [7 + index % 2 for index in range(places)]
    resets = await asyncio.gather(*(client.reset(seed=seed) for client, seed in zip(clients, seeds, strict=True)))
    states = await asyncio.gather(*(client.state() for client in clients))
    steps = await asyncio.gather(*(client.step({"message": "5"}) for client in clients))
    more = GenericEnvClient(base_url=url)
    try:
        await more.connect()
        await more.reset(seed=7)
        refusal = ""
    except Exception as error:
        refusal = str(error)
    await asyncio.gather(*(client.close() for client in clients))
    return {
        "version": importlib.metadata.version("openenv"),
        "seeds": seeds,
        "problems": [result.observation["prompt"] for result in resets],
        "rewards": [result.reward for result in steps],
        "states": [sorted(state) for state in states],
        "refusal": refusal,
    }


async def agilerl(url, places):
    from agilerl.llm_envs.openenv import RemoteEnvClient

    clients = [RemoteEnvClient(url) for _ in range(places)]
    seeds = [7 + index % 2 for index in range(places)]
    resets = [client.reset(seed=seed) for client, seed in zip(clients, seeds, strict=True)]
    tools = [client.tools for client in clients]
    steps = [client.step("5") for client in clients]
    refusal = []

    def one_more():
        try:
            RemoteEnvClient(url).reset(seed=7)
        except Exception as error:
            refusal.append(f"{error} {error.__cause__ or ''}")

    thread = threading.Thread(target=one_more)
    thread.start()
    thread.join(60)
    for client in clients:
        client.close()
    return {
        "version": importlib.metadata.version("agilerl"),
        "seeds": seeds,
        "problems": [str(payload["prompt"] if isinstance(payload, dict) else payload) for payload, _ in resets],
        "rewards": [reward for _, reward, *_ in steps],
        "states": [sorted(map(str, names)) for names in tools],
        "refusal": "".join(refusal),
    }


if __name__ == "__main__":
    name, url, places = sys.argv[1:]
    print(json.dumps(asyncio.run(globals()[name](url, int(places)))))
