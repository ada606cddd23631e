"""The configuration: one tree for a run, one small tree for an env server, and how both are read.

Every process reads its resolved file with `load_run` / `load_env_server`; only the launcher writes them. A key that is
not here is an error; a key that is here does something.
"""

from shmrl.config.deployment import Deployment, JobConfig
from shmrl.config.host import ArenaConfig, NodeConfig
from shmrl.config.load import dump_toml, env_server_from, load_env_server, load_eval, load_run, read_layers
from shmrl.config.sources import EvalSource, Sampling, ServeConfig, TrainSource, WorkerPool
from shmrl.config.tables import Log, ModelConfig, TinyModel
from shmrl.config.training import Loss
from shmrl.config.tree import EnvServerConfig, EvalConfig, RunTree, socket_dir, socket_root
from shmrl.units import parse_bytes

__all__ = [
    "ArenaConfig",
    "Deployment",
    "EnvServerConfig",
    "EvalConfig",
    "EvalSource",
    "JobConfig",
    "Log",
    "Loss",
    "ModelConfig",
    "NodeConfig",
    "RunTree",
    "Sampling",
    "ServeConfig",
    "TinyModel",
    "TrainSource",
    "WorkerPool",
    "dump_toml",
    "env_server_from",
    "load_env_server",
    "load_eval",
    "load_run",
    "parse_bytes",
    "read_layers",
    "socket_dir",
    "socket_root",
]
