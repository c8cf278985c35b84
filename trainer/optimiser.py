"""AdamW for a policy, its learning rate, and its state as plain tensors (no pickles on disk).

A policy that is published in bfloat16 has float32 masters here: an optimiser step changes about one bfloat16 value in a
hundred, and what it adds to the others must not be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from protocol.errors import ModelError
from trainer.parallel import gather, is_sharded, own_part
from trainer.policy import Policy
from trainer.recipe import OptimiserSettings
from trainer.stored import StoredTensors

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_MASTER = "master"


class MasterAdamW(AdamW):
    """AdamW over the masters of a policy's parameters, which are the parameters themselves when they are float32.

    The policy's own values are its masters rounded to bfloat16 after each step: what is published is what the trainer
    computes with.
    """

    def __init__(self, policy: Policy, settings: OptimiserSettings) -> None:
        self.parameters = policy.parameters()
        self.masters = self.parameters
        if policy.settings.dtype == "bfloat16":
            self.masters = {name: nn.Parameter(held.detach().clone()) for name, held in self.parameters.items()}
        # The fused kernel knows no sharded tensors; over ordinary ones it is by far the fastest.
        sharded = any(is_sharded(held) for held in self.parameters.values())
        super().__init__(
            self.masters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=not sharded,
            foreach=False if sharded else None,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the masters along the policy's gradients, then the policy to its masters."""
        if self.masters is self.parameters:
            super().step(closure)
            return
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad
        super().step(closure)
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master.to(torch.bfloat16))
                master.grad = None


def make_optimiser(policy: Policy, settings: OptimiserSettings) -> MasterAdamW:
    """A fresh optimiser over all parameters of a policy."""
    return MasterAdamW(policy, settings)


def set_learning_rate(optimiser: AdamW, settings: OptimiserSettings, step: int) -> float:
    """Set and return the rate of a training step: it rises linearly at first, then stays."""
    rate = settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warm_up_steps))
    for group in optimiser.param_groups:
        group["lr"] = rate
    return rate


def optimiser_tensors(optimiser: MasterAdamW, *, keep: bool = True) -> dict[str, Tensor]:
    """Moments and masters by `<parameter>:<what>`, whole and on the CPU.

    A collective call where the policy is sharded; nothing in a process that does not `keep` them.
    """
    tensors: dict[str, Tensor] = {}
    for name, master in optimiser.masters.items():
        tensors |= {f"{name}:{moment}": value for moment, value in optimiser.state.get(master, {}).items()}
        if optimiser.masters is not optimiser.parameters:
            tensors[f"{name}:{_MASTER}"] = master
    return gather(tensors, keep=keep)


def write_optimiser(tensors: dict[str, Tensor], path: Path) -> None:
    """Write what `optimiser_tensors` gave."""
    save_file(tensors, path, metadata={"format": "pt"})


def restore_optimiser(optimiser: MasterAdamW, path: Path) -> None:
    """Read moments and masters back, exactly, of a sharded policy this process's share.

    Raises ModelError when they are not this policy's.
    """
    try:
        with StoredTensors([path]) as stored:
            _restore(optimiser, stored, path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the optimiser's state in {path} cannot be read: {error}") from error


def _restore(optimiser: MasterAdamW, stored: StoredTensors, path: Path) -> None:
    left = stored.names
    for name, master in optimiser.masters.items():
        _restore_master(optimiser, name, stored, path)
        moments = {moment: f"{name}:{moment}" for moment in _MOMENTS if f"{name}:{moment}" in left}
        left -= {f"{name}:{_MASTER}", *moments.values()}
        if not moments:
            continue
        if len(moments) != len(_MOMENTS) or stored.shape(moments["exp_avg"]) != master.shape:
            raise ModelError(f"the optimiser's state in {path} does not fit the parameter {name}")
        optimiser.state[master] = {
            moment: stored.read(key) if moment == "step" else stored.read_like(key, master.detach())
            for moment, key in moments.items()
        }
    if left:
        raise ModelError(f"the optimiser's state in {path} belongs to another model: it holds {min(left)}")


def _restore_master(optimiser: MasterAdamW, name: str, stored: StoredTensors, path: Path) -> None:
    key, master = f"{name}:{_MASTER}", optimiser.masters[name]
    has_masters = key in stored.names
    if has_masters == (optimiser.masters is optimiser.parameters):
        raise ModelError(
            f"the optimiser's state in {path} {'has' if has_masters else 'lacks'} float32 masters: it was written "
            "with another policy.dtype",
            hint="a run keeps the recipe that it was created with",
        )
    if has_masters:
        if stored.shape(key) != master.shape:
            raise ModelError(f"the optimiser's state in {path} does not fit the parameter {name}")
        with torch.no_grad():
            master.copy_(stored.read_like(key, master.detach()))


def clip_gradients(optimiser: MasterAdamW, max_norm: float) -> Tensor:
    """Scale the policy's gradients to a norm of `max_norm` at most; gives the norm that they had, over all processes.

    The paper clips aggressively: 0.05 to 0.1 at 32 billion parameters (INTELLECT-2, section 3.5).
    """
    norm = nn.utils.clip_grad_norm_(optimiser.parameters.values(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def all_finite(loss: Tensor, grad_norm: Tensor) -> bool:
    """Whether an optimiser step may be taken."""
    return bool(torch.isfinite(loss) and torch.isfinite(grad_norm))


def not_finite(optimiser: MasterAdamW) -> list[str]:
    """Names of the parameters and masters of which this process holds a value that is NaN or infinite."""
    every = {name: [held, optimiser.masters[name]] for name, held in optimiser.parameters.items()}
    return [name for name, both in every.items() if not all(own_part(each).isfinite().all() for each in both)]
