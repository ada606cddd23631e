"""An environment whose episodes take a while, so that a test can hit a run in its middle."""

import asyncio

from shmrl.envs.reverse_text import ReverseText


class SlowReverseText(ReverseText):
    """`reverse-text` after a pause of `delay_s` seconds."""

    def __init__(self, delay_s, **args):
        super().__init__(**args)
        self.delay_s = delay_s

    async def rollout(self, task, model):
        await asyncio.sleep(self.delay_s)
        return await super().rollout(task, model)
