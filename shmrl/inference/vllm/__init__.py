"""vLLM as the engine: what its versions can do, how it is started, and what is checked before it is trusted.

`versions` and `launch` serve the launcher and `shmrl inference`, `checks` the orchestrator; none of them imports torch
or vllm. `plugin/` is what runs inside vLLM's workers, and `shmrl_broadcast` there also on trainer rank 0.
"""
