"""A model's output layer in pieces: log-probabilities of chosen tokens without all logits in memory at once.

32 thousand tokens times 152 thousand words are 20 GB of float32, several times over with their gradient. Where a
micro-batch has so many, the output layer gives log-probability and entropy in place of logits, piece by piece, and each
piece is computed again for its gradient. It works from inside the model's own forward pass, where FSDP has the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PIECE_ELEMENTS: Final = 1 << 26
"""Logits that are in memory at once: 256 MB, some four times."""


def score_logits(logits: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets [N] and entropies, both [N], from logits [N, V]; the latter's gradient if asked."""
    scaled = logits.float()
    distribution = (scaled if temperature == 1 else scaled / temperature).log_softmax(-1)
    source = distribution if with_entropy else distribution.detach()
    return distribution.gather(-1, targets[:, None])[:, 0], -(source.exp() * source).sum(-1)


@dataclass(frozen=True)
class Job:
    """What the output layer is to score in place of giving logits."""

    rows: Tensor
    """[N] of the hidden states that it gets, laid end to end."""
    targets: Tensor
    temperature: float
    with_entropy: bool
    piece: int
    """Rows at once."""


class PiecewiseHead:
    """Stands in front of an output layer; without a job the layer is as it was."""

    def __init__(self, layer: nn.Module) -> None:
        self._logits = layer.forward
        self._layer = layer
        self.job: Job | None = None
        layer.forward = self.forward

    def remove(self) -> None:
        self._layer.forward = self._logits

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, U, H] to [1, N, 2], log-probability and entropy; without a job to logits [B, U, V]."""
        job = self.job
        if job is None:
            logits: Tensor = self._logits(hidden)
            return logits
        chosen = hidden.flatten(0, 1).index_select(0, job.rows)
        pieces = [
            checkpoint(self._score, chosen[at : at + job.piece], at, job, use_reentrant=False)
            for at in range(0, len(chosen), job.piece)
        ]
        return torch.stack([torch.cat(pieces)])  # a copy: FSDP refuses views

    def _score(self, hidden: Tensor, at: int, job: Job) -> Tensor:
        targets = job.targets[at : at + job.piece]
        scores = score_logits(self._logits(hidden), targets, job.temperature, with_entropy=job.with_entropy)
        return torch.stack(scores, dim=-1)
