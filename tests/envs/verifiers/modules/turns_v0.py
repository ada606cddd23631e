"""An environment of verifiers v0 with turns and a tool: after each reply the user says how long it was."""

import verifiers as vf
from datasets import Dataset


async def turns(state, **_):
    return float(len(state["trajectory"]))


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": f"{len(messages[-1]['content'] or '')} letters"}]


def upper(text: str) -> str:
    """The text in capitals."""
    return text.upper()


def load_environment(max_turns: int = 3, tools: bool = False, fails: bool = False) -> vf.Environment:
    rows = Dataset.from_list([{"question": "say something", "answer": ""}])
    if fails:
        raise LookupError("the data set is not here")
    if tools:
        return vf.ToolEnv(tools=[upper], max_turns=max_turns, dataset=rows, rubric=vf.Rubric(funcs=[turns]))
    return Turns(max_turns=max_turns, dataset=rows, rubric=vf.Rubric(funcs=[turns], weights=[0.5]))
