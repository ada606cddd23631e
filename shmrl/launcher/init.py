"""`shmrl init`: a first configuration for this machine, with a comment on what one changes first.

What it writes runs as it stands: a small model made on the spot learns to reverse short strings, on the GPUs if there
are any. Ports that are taken now are avoided.
"""

from __future__ import annotations

from pathlib import Path

from shmrl.errors import ConfigError
from shmrl.launcher.machine import Machine, machine
from shmrl.node.ports import free_after, is_free

ENGINE_PORT, ENV_PORT = 8000, 5000  # where they are free
_TEXT = """\
# {file}: written by `shmrl init` on a machine with
# {machine}
#
#   shmrl run {file} --dry-run     what would be started, and the memory it needs
#   shmrl run {file}               a small model learns to reverse strings: minutes
#   shmrl keys trainer{pad}    every key of a table, with its type, default and meaning
#
# Any key is a flag, too: --trainer.optimizer.lr 3e-4

[run]
name = "first"                    # and runs/first is where everything goes; --run.output-dir DIR for elsewhere
max_steps = 50

# A model of your own is a directory in Hugging Face layout. It replaces [model.tiny] and [warmup]:
# [model]
# path = "/models/Qwen3-30B-A3B"
[model.tiny]                      # made on the spot: a mixture of experts, random weights
layers = 4
hidden = 64
experts = 8
top_k = 2

[warmup]                          # supervised steps, so that random weights get a reward now and then
steps = 300
lr = 3e-3
batch_size = 64

[arena]                           # shared memory for what the trainer alone reads
capacity = "{capacity}MiB"{capacity_note}
{backing}
[inference]                       # the engine
port = {engine_port}
{engine}max_model_len = 64                # tokens of prompt and reply
max_num_seqs = 128                # requests side by side
# backend = "vllm"                # a vLLM server instead of the small engine of our own; of another interpreter:
# python = "/opt/vllm/bin/python"

[orchestrator]
batch_size = 256                  # episodes of a step
group_size = 8                    # episodes per task, scored against each other
seq_len = 1024                    # tokens of a micro batch; longer episodes are cut
max_off_policy_steps = 1          # versions that an episode may lag behind; 0: strictly synchronous
env_server_base_port = {base_port}       # source i is served at this + i
advantage = {{ std = true }}

[[orchestrator.train.source]]     # an environment; more of these, with `ratio`, are mixed
name = "reverse-text"
env = {{ id = "reverse-text", args = {{ min_length = 4, max_length = 7, demonstration_noise = 0.5 }} }}
sampling = {{ temperature = 1.0, top_p = 0.98, top_k = 64, max_tokens = 12 }}
serve = {{ pool = {{ kind = "static", workers = {workers} }} }}     # processes
# env.id = "my_module:MyEnvironment" is one of your own (README)

[[orchestrator.eval.source]]      # evaluated before the first step, every `interval` and at the end
name = "reverse-text-eval"
env = {{ id = "reverse-text", args = {{ min_length = 4, max_length = 7, seed = 1 }} }}
sampling = {{ temperature = 1.0, max_tokens = 12 }}
interval = 25
num_examples = 256

[trainer]
ranks = {ranks}{ranks_note}
{device}router_replay = true              # train tokens through the experts that the engine chose; not for dense models
sampling_replay = true            # probabilities over the ids that top_p left
head = 16                         # width of the sampler's head that is kept

[trainer.optimizer]
lr = 8e-4

[trainer.checkpoint]
interval = 20                     # steps; a run that dies goes on from the last with --resume
"""


def write(path: Path, *, replace: bool = False) -> str:
    """Write the file; what to type next. ConfigError if it is there, or cannot be written."""
    if path.exists() and not replace:
        raise ConfigError(f"{path} is there already: name another file, or replace it with --force")
    here = machine()
    try:
        path.write_text(text(path, here))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return f"wrote {path}, for {here}\nnext:  shmrl run {path} --dry-run"


def text(path: Path, here: Machine) -> str:
    """The configuration. Where /dev/shm is small the arena is a memfd, which needs none."""
    small = here.shm_free < 256 << 20
    room = (here.memory_free if small else here.shm_free) // 2
    gpus = len(here.gpus)
    ranks = max(1, gpus - 1) if gpus else min(2, here.cores)
    return _TEXT.format(
        file=path,
        pad=" " * (len(str(path)) + 3),
        machine=here,
        capacity=max(1, min(1 << 10, room >> 20)),
        capacity_note="              # half of what is free, without this line",
        backing='backing = "memfd"                 # /dev/shm is small here\n' if small else "",
        engine_port=_port(ENGINE_PORT),
        engine=f'device = "cuda:{gpus - 1}"                 # the last GPU\n' if gpus else "",
        base_port=_port(ENV_PORT, 2),
        workers=max(1, min(4, here.cores // 2)),
        ranks=ranks,
        ranks_note="                         # processes" + (", each with a GPU of its own" if gpus > 1 else ""),
        device='device = "cuda"\n' if gpus else "",
    )


def _port(wanted: int, count: int = 1) -> int:
    if all(is_free("127.0.0.1", wanted + i) for i in range(count)):
        return wanted
    return free_after("127.0.0.1", wanted, count) or wanted
