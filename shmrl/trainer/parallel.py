"""The ranks of the trainer: process group, DDP or FSDP2 behind one switch, and the few collectives a step needs.

gloo on CPU, nccl on GPU; started by `python -m torch.distributed.run`, or alone as a world of one. Both wrappers
average gradients over ranks, so a loss is scaled by world / global tokens. Runs in every trainer rank.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shmrl.config.training import Trainer
from shmrl.trainer.policy import Policy


def leave(code: int) -> NoReturn:
    """End this rank's process without tearing torch down.

    The group's background threads outlive `destroy_process_group` where a wrapped module still refers to it, and
    destroying them at interpreter exit can abort ("terminate called without an active exception") a rank that is done.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Ranks:
    """This rank among the trainer's. `close()` leaves the group.

    Attributes: rank, world; device: cpu, or the CUDA device of this local rank.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"  # the former: offloaded gradients
        self._host_shards = False
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def close(self) -> None:
        """Leave the group together: a rank that tears its sockets down while another still uses them aborts it."""
        dist.barrier()
        dist.destroy_process_group()

    def wrap(self, policy: Policy, config: Trainer) -> nn.Module:
        """The module to call: sharded by decoder layer, replicated, or (a world of one without fsdp) the policy itself.

        Build the optimizer afterwards: sharding replaces the parameters.
        """
        if config.fsdp:
            return self._shard(policy, config)
        if self.world == 1:
            return policy
        buffers = [name for name, _ in policy.named_buffers()]  # every rank has loaded the same ones, and none changes
        ddp: Any = DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(policy, buffers)
        return DistributedDataParallel(policy)

    def _shard(self, policy: Policy, config: Trainer) -> nn.Module:
        """Computes in bfloat16 where asked, reduces gradients in float32; offloaded shards live in host memory."""
        bfloat16 = config.precision == "bfloat16"
        options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
        }
        if config.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for layer in policy.lm.get_decoder().layers:
            fully_shard(layer, **options)
        fully_shard(policy, **options)
        self._host_shards = config.cpu_offload
        return policy

    @torch.no_grad()
    def scatter(self, policy: Policy, full: Policy | None) -> None:
        """Give a sharded policy without memory (device meta) the values of `full`, which rank 0 alone holds.

        A tensor at a time, so that no rank but rank 0 ever has the whole. A collective.
        """
        policy.to_empty(device="cpu" if self._host_shards else self.device)
        for name, parameter in policy.named_parameters():
            assert isinstance(parameter, DTensor)
            source = torch.empty(parameter.shape, device=self.device) if full is None else full.get_parameter(name)
            placed = source.detach().to(self.device)
            shard = distribute_tensor(placed, parameter.device_mesh, parameter.placements).to_local()
            parameter.to_local().copy_(shard)
        for name, buffer in list(policy.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            value = torch.empty_like(buffer, device=self.device) if full is None else full.get_buffer(name)
            value = value.to(self.device).contiguous()
            dist.broadcast(value, 0)
            policy.get_submodule(owner)._buffers[leaf] = value

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all ranks, in place."""
        placed = values.to(self.device)
        dist.all_reduce(placed)
        return placed.to(values.device)

    def gather(self, values: list[float]) -> Tensor:
        """float64 [world, len(values)] on the host, the same on every rank."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small value, on every rank."""
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out


@contextmanager
def gradient_sync(module: nn.Module, on: bool) -> Iterator[None]:
    """Around forward and backward of one micro batch: gradients travel between ranks only in the last."""
    if isinstance(module, DistributedDataParallel) and not on:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on)
    yield


def clip_gradients(module: nn.Module, limit: float) -> float:
    """Scale gradients to a global norm of at most `limit`; the norm before it. Call on every rank."""
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def full_state(lm: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """The language model's whole state dict in host memory. A collective when sharded: call on every rank.

    keep = False takes part only, a tensor at a time, and gives an empty one: a rank that writes nothing needs none.
    """
    state = {}
    for name, tensor in lm.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            state[name] = whole.detach().cpu()
    return state
