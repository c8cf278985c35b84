"""One trainer over several processes: FSDP2 shards of a policy, and the few sums that its processes share.

torchrun starts the processes and says who is who by environment variables; gloo carries CPU tensors, NCCL GPUs' ones.
Gradients are averaged over processes by FSDP, so each one's loss is multiplied by their number. Every process must make
the same calls in the same order. Nothing here happens in a trainer of one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer.recipe import Format

_PATIENCE: Final = timedelta(days=30)
"""How long a process waits for the next call: a step's rollouts may take as long to come."""


@dataclass(frozen=True)
class World:
    """The processes of one trainer, and which one this is."""

    rank: int = 0
    size: int = 1

    def share(self, data: bytes | None) -> bytes:
        """What process 0 gives, in every process."""
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0)
        body = torch.frombuffer(bytearray(data or bytes(int(length))), dtype=torch.uint8)
        dist.broadcast(body, 0)
        return body.numpy().tobytes()

    def sum(self, values: Tensor) -> Tensor:
        """Add over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def greatest(self, values: Tensor) -> Tensor:
        """The largest over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


ALONE: Final = World()


def own_device(device: str) -> str:
    """The GPU of this process, where torchrun started several; else what was asked for."""
    local = os.environ.get("LOCAL_RANK")
    if not device.startswith("cuda") or local is None:
        return device
    torch.cuda.set_device(int(local))
    return f"cuda:{local}"


def join_world() -> World:
    """Meet the other processes that torchrun started; a process that it did not start is alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)
    return World(dist.get_rank(), dist.get_world_size())


def shard(model: nn.Module, world: World, *, device: str, compute: Format) -> None:
    """Spread a transformers model over the processes: layer by layer, then what is left."""
    if world.size == 1:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second of import

    mesh = init_device_mesh(torch.device(device).type, (world.size,))
    precision = MixedPrecisionPolicy()
    if compute == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def recompute_layers(model: nn.Module) -> None:
    """Keep only what enters each layer, and compute its inside again on the way back (activation checkpointing)."""
    for layer in _layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks: the longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of it."""
    return isinstance(tensor, DTensor)


def reshard(model: nn.Module) -> None:
    """Give up what a pass without gradients has left put together."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather(tensors: Mapping[str, Tensor], *, keep: bool = True, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All of each tensor on the CPU, in another number format if one is given; nothing unless this process keeps them.

    A collective call for sharded tensors, which are put together one after another.
    """
    kept = {}
    for name, tensor in tensors.items():
        held = tensor.detach()
        if isinstance(held, DTensor):
            held = held.full_tensor()
        if keep:
            kept[name] = held.to(dtype or held.dtype).cpu().contiguous()
    return kept


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held
