"""reverse-text as a taskset of verifiers v1 (0.4), without a data set. verifiers finds it by its name."""

import random

import verifiers.v1 as vf


class WordsConfig(vf.TasksetConfig):
    seed: int = 0
    num_tasks: int = 1000


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """The share of the answer's letters that stand in the reply."""
        answer = self.data.answer
        return sum(letter in trace.last_reply for letter in answer) / len(answer)

    @vf.reward(weight=0.5)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def reply_length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReverseText(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        draw = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            word = "".join(draw.choices("abcdefgh", k=draw.randint(4, 7)))
            yield WordTask(WordData(prompt=word, answer=word[::-1]), self.config.task)


__all__ = ["ReverseText"]
