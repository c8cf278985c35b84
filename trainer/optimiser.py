"""AdamW for a policy, its learning rate, and its state as plain tensors (no pickles on disk)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import AdamW

from protocol.errors import ModelError
from trainer.policy import Policy
from trainer.recipe import OptimiserSettings

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def make_optimiser(policy: Policy, settings: OptimiserSettings) -> AdamW:
    """A fresh AdamW over all parameters of a policy."""
    return AdamW(
        policy.parameters().values(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def set_learning_rate(optimiser: AdamW, settings: OptimiserSettings, step: int) -> float:
    """Set and return the rate of a training step: it rises linearly at first, then stays."""
    rate = settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warm_up_steps))
    for group in optimiser.param_groups:
        group["lr"] = rate
    return rate


def save_optimiser(policy: Policy, optimiser: AdamW, path: Path) -> None:
    """Write the moments, named after the parameters."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.parameters().items():
        for moment, value in optimiser.state.get(parameter, {}).items():
            tensors[f"{name}:{moment}"] = value.detach().cpu().contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def restore_optimiser(policy: Policy, optimiser: AdamW, path: Path) -> None:
    """Read the moments back, exactly. Raises ModelError when they are not this policy's."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the optimiser's state in {path} cannot be read: {error}") from error
    for name, parameter in policy.parameters().items():
        moments = {moment: tensors.pop(f"{name}:{moment}") for moment in _MOMENTS if f"{name}:{moment}" in tensors}
        if not moments:
            continue
        if len(moments) != len(_MOMENTS) or moments["exp_avg"].shape != parameter.shape:
            raise ModelError(f"the optimiser's state in {path} does not fit the parameter {name}")
        optimiser.state[parameter] = {key: value.clone().to(parameter.device) for key, value in moments.items()}
    if tensors:
        raise ModelError(f"the optimiser's state in {path} belongs to another model: it holds {min(tensors)}")


def all_finite(loss: Tensor, grad_norm: Tensor) -> bool:
    """Whether an optimiser step may be taken."""
    return bool(torch.isfinite(loss) and torch.isfinite(grad_norm))
