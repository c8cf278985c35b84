"""The matrix products of a policy: weights laid out for the processor once, when they are loaded.

On x86 CPUs oneDNN multiplies by float32 weights that it has reordered beforehand, at about twice the speed of a plain
product on some processors and with rows that do not depend on the size of the batch. It is reached through operators
that torch's own compiler uses; where a build lacks them, products are plain.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_PACKED: Final = 1 << 16
"""Weights of a matrix from which on reordering pays; below it a call costs more than it saves."""


class Linear:
    """y = x Wᵀ + b for W [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = packs(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def packs(weight: Tensor) -> bool:
    """Whether a matrix would be reordered, into memory of its own."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _LEAST_PACKED
        and _can_reorder()
    )


@cache
def _can_reorder() -> bool:
    try:
        one = torch.ones(1, 1)
        torch.ops.mkldnn._linear_pointwise(
            one, torch.ops.mkldnn._reorder_linear_weight(one, None), None, "none", [], ""
        )
    except (AttributeError, RuntimeError):
        return False
    return True
