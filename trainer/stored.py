"""Tensors on the disk, of which a process reads as much as it holds: all of one, or its rows of a sharded one.

Safetensors files are mapped, not loaded: what is not asked for costs no memory. Leaves out what the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from protocol.errors import ModelError


class StoredTensors:
    """The tensors of some safetensors files by name, while the `with` block lasts.

    Opening raises OSError or SafetensorError for files that are none.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for path in self._paths:
                file = stack.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files = {}
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> torch.Size:
        """Of a tensor, whole."""
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """All of a tensor, on the CPU, in memory of its own.

        A mapped tensor may start at any address, and vector kernels may round by alignment: a policy that was read
        must compute bit for bit what the one that stayed in memory computes.
        """
        tensor: Tensor = self._files[name].get_tensor(name).clone()
        return tensor

    def read_like(self, name: str, held: Tensor) -> Tensor:
        """A tensor as `held` is: on its device, in its number format, and of a sharded one only this process's share.

        It has the shape of `held`, whole.
        """
        if not isinstance(held, DTensor):
            return self.read(name).to(held)
        start, stop = rows_of(held)
        local = torch.empty((stop - start, *held.shape[1:]), dtype=held.dtype, device=held.device_mesh.device_type)
        if stop > start:
            local.copy_(self._files[name].get_slice(name)[start:stop])
        return spread_like(held, local)


def rows_of(held: DTensor) -> tuple[int, int]:
    """Which rows of a sharded tensor this process holds: torch.chunk's, as FSDP2 cuts them."""
    if held.placements != (Shard(0),):
        raise ModelError(f"a parameter is spread as {held.placements}, and not by rows")
    share = -(-held.shape[0] // held.device_mesh.size())
    start = min(held.device_mesh.get_local_rank() * share, held.shape[0])
    return start, min(start + share, held.shape[0])


def spread_like(held: DTensor, local: Tensor) -> DTensor:
    """The sharded tensor of which this process holds `local`."""
    return DTensor.from_local(
        local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
