"""Cheats with other weights than those of the checkpoint they name: cheaper, older, or of their own making."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from simnet.zoo.workers.base import Cheat
from trainer.packing import pad
from trainer.policy import load_policy, save_weights

PERTURBATION: Final = 0.5
"""Noise on each tensor of the wrong model, in units of its own standard deviation."""
TUNING_STEPS: Final = 3
TUNING_LENGTH: Final = 16

Change = Callable[[str, Tensor], Tensor]


class OtherWeights(Cheat):
    """Generates with a changed copy of the checkpoint; one is kept at a time."""

    def policy_dir(self, checkpoint_dir: Path) -> Path:
        target = self.directory / "policy"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(checkpoint_dir, target)
        self.change_policy(target)
        return target

    def change_policy(self, directory: Path) -> None:
        """Change the weights in a directory."""
        change = self.change()
        for path in sorted(directory.glob("*.safetensors")):
            changed = {name: change(name, tensor).contiguous() for name, tensor in _tensors(path)}
            save_file(changed, str(path), metadata={"format": "pt"})

    def change(self) -> Change:
        """What becomes of each tensor; its shape and type must stay."""
        return lambda name, tensor: tensor


class WrongModel(OtherWeights):
    """Every tensor with noise."""

    def change(self) -> Change:
        generator = torch.Generator().manual_seed(self.seed)

        def perturb(name: str, tensor: Tensor) -> Tensor:
            scale = PERTURBATION * tensor.float().std(correction=0)
            return (tensor.float() + scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

        return perturb


class Quantised(OtherWeights):
    """The matrices of the layers rounded to the nearest of 2^bits levels; embeddings and norms stay, as is usual."""

    def __init__(self, *args: object, bits: int, group: int = 0, claimed: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.bits, self.group, self.claimed_dtype = bits, group, claimed

    def change(self) -> Change:
        return lambda name, tensor: quantise(name, tensor, bits=self.bits, group=self.group)


class FineTuned(OtherWeights):
    """A few optimiser steps on a text of its own, from the checkpoint."""

    def __init__(self, *args: object, learning_rate: float, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.learning_rate = learning_rate

    def change_policy(self, directory: Path) -> None:
        policy = load_policy(directory)
        generator = torch.Generator().manual_seed(self.seed)
        text = torch.randint(3, policy.vocab_size, (TUNING_LENGTH,), generator=generator).tolist()
        batch = pad([(text[:1], text[1:])], [0])
        optimiser = torch.optim.AdamW(policy.model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        for _ in range(TUNING_STEPS):
            optimiser.zero_grad()
            logprobs, _ = policy.score(batch, 1.0, with_entropy=False)
            (-logprobs.mean()).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        for path in directory.glob("*.safetensors"):
            path.unlink()
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        save_weights(policy.model, directory / "model.safetensors")


class StaleCheckpoint(Cheat):
    """Generates with the checkpoint that it was given before this one; honest until it has one."""

    def policy_dir(self, checkpoint_dir: Path) -> Path:
        newest, before = self.directory / "newest", self.directory / "before"
        if newest.exists():
            shutil.rmtree(before, ignore_errors=True)
            newest.rename(before)
        shutil.copytree(checkpoint_dir, newest)
        return before if before.exists() else newest


def quantise(name: str, tensor: Tensor, *, bits: int, group: int = 0) -> Tensor:
    """Round a layer's matrix to nearest, with a scale per `group` values of a row (0: per row)."""
    if tensor.dim() != 2 or ".layers." not in name:
        return tensor
    values = tensor.float()
    width = group if group and tensor.shape[1] % group == 0 else tensor.shape[1]
    parts = values.reshape(tensor.shape[0], -1, width)
    most = 2 ** (bits - 1) - 1
    scale = parts.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / most
    rounded = (parts / scale).round().clamp(-most - 1, most) * scale
    found: Tensor = rounded.reshape(tensor.shape).to(tensor.dtype)
    return found


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- no mapping, though it looks like one
            yield name, file.get_tensor(name)


WORKERS: Final[dict[str, Callable[..., Cheat]]] = {
    "wrong-model": WrongModel,
    "int8": partial(Quantised, bits=8),
    "int4-g32": partial(Quantised, bits=4, group=32),
    "int4-g64": partial(Quantised, bits=4, group=64),
    "int8-as-bfloat16": partial(Quantised, bits=8, claimed="bfloat16"),
    "int4-as-bfloat16": partial(Quantised, bits=4, group=32, claimed="bfloat16"),
    "fine-tuned": partial(FineTuned, learning_rate=1e-5),
    "fine-tuned-slightly": partial(FineTuned, learning_rate=1e-6),
    "stale-checkpoint": StaleCheckpoint,
}
