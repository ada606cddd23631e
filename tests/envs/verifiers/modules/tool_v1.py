"""A taskset of verifiers v1 with a tool: the reply is right when it says what the tool gave."""

import verifiers.v1 as vf


class Letters(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "letters"

    @vf.tool
    def upper(self, text: str) -> str:
        """The text in capitals."""
        return text.upper()


class ToolTask(vf.Task):
    @classmethod
    def toolsets(cls, config):
        return [Letters(vf.ToolsetConfig())]

    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float([message.content for message in trace.tool_messages] == ["ABC"])


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="abc in capitals", system_prompt="use tools"), self.config.task)


__all__ = ["ToolTaskset"]

if __name__ == "__main__":  # verifiers starts the tool's server so
    Letters.run()
