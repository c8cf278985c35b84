"""How far a submission's rollouts lie from this node's own pass over them: numbers, no limits (INTELLECT-2, 2.3).

Takes what the engine computes, `Prefill` by `Prefill`, and compares it with what the contributor recorded: TOPLOC
proofs, sampling margins, log-probabilities. Rows of several rollouts are compared together, in tiles of bounded
memory, because a small model's rollouts are too short to be worth a call each. What follows from the numbers is
decided in node.validator.checks; calibration uses the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.engines.base import Prefill
from protocol.constants import PROOF_CHUNK_TOKENS
from protocol.rollouts import Rollout
from protocol.sampling import margins, position_keys
from protocol.toploc import ChunkResult, verify_proofs

MARGIN_CLIP: Final = 0.5
"""Margins count up to this much in means: one wild token says little about all others."""
MANTISSA_CLIP: Final = 16.0
"""Mantissa means of chunks count up to this much in a rollout's mean; a chunk without any match has 2^64."""
_TILE_LOGITS: Final = 1 << 22
"""Logits that are compared at a time: rows × vocabulary."""
_TILE_VALUES: Final = 1 << 24
"""Hidden values that wait for their proofs: rows × width."""


@dataclass(frozen=True)
class MeasuredChunk:
    """One proof: how many of its points and rows there are, and how far they lie off."""

    rows: int
    points: int
    result: ChunkResult


@dataclass
class MeasuredRollout:
    """One answer of N tokens."""

    tokens: int
    margins: NDArray[np.float32]
    """float32[N]: by how much each token lost, in logits."""
    logprob_error: float = 0.0
    chunks: list[MeasuredChunk] = field(default_factory=list)

    @cached_property
    def mean_margin(self) -> float:
        """Of its clipped margins."""
        return float(np.minimum(self.margins, np.float32(MARGIN_CLIP)).mean(dtype=np.float64))

    @cached_property
    def mantissa_mean(self) -> float:
        """Mean over its chunks, each clipped and weighed by its rows."""
        total = sum(chunk.rows * min(chunk.result.mantissa_mean, MANTISSA_CLIP) for chunk in self.chunks)
        return total / self.tokens


@dataclass(frozen=True)
class _Rows:
    """Some rows of one rollout whose logits wait to be compared."""

    index: int
    part: slice
    logits: NDArray[np.float32]


class Measurer:
    """Measures the rollouts of one submission. `broken` says that the policy gives logits that are not finite."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        noise_seed: Callable[[Rollout], bytes],
        *,
        temperature: float,
        top_k: int,
    ) -> None:
        self.broken = False
        self._rollouts = rollouts
        self._noise_seed = noise_seed
        self._temperature = temperature
        self._top_k = top_k
        counts = [len(rollout.output_ids) for rollout in rollouts]
        self._measured = [MeasuredRollout(count, np.full(count, np.inf, np.float32)) for count in counts]
        self._keys: dict[int, NDArray[np.uint32]] = {}
        self._rows: list[_Rows] = []
        self._proofs: list[tuple[int, NDArray[np.uint16]]] = []

    def add(self, prefill: Prefill) -> None:
        """Take one answer's pass into account, at once or with later ones."""
        if self.broken:
            return
        index, (count, width) = prefill.index, prefill.patterns.shape
        self._keys[index] = position_keys(self._noise_seed(self._rollouts[index]), count)
        self._proofs.append((index, prefill.patterns))
        if sum(patterns.size for _, patterns in self._proofs) >= _TILE_VALUES or width == 0:
            self._verify()
        start = 0
        while start < count:
            # The vocabulary's size is the engine's to know: one row tells it, the others come in whole tiles.
            start += self._add_rows(prefill, start, count)

    def results(self) -> list[MeasuredRollout]:
        """The numbers of every rollout, in order, once all were added."""
        self._compare()
        self._verify()
        return self._measured

    def _add_rows(self, prefill: Prefill, start: int, count: int) -> int:
        vocabulary = self._rows[0].logits.shape[1] if self._rows else 0
        step = max(1, _TILE_LOGITS // vocabulary) if vocabulary else 1
        part = slice(start, min(count, start + step))
        self._rows.append(_Rows(prefill.index, part, prefill.logits(part.start, part.stop)))
        if sum(rows.logits.size for rows in self._rows) >= _TILE_LOGITS:
            self._compare()
        return part.stop - part.start
