"""How far a submission's rollouts lie from this node's own pass over them: numbers, no limits (INTELLECT-2, 2.3).

Takes what the engine computes, `Prefill` by `Prefill`, and compares it with what the contributor recorded: TOPLOC
proofs, sampling margins, log-probabilities. Rows of several rollouts are compared together, in tiles of bounded
memory, because a small model's rollouts are too short to be worth a call each. What follows from the numbers is
decided in node.validator.checks; calibration uses the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
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
LOGPROB_CLIP: Final = 0.5
"""The same for the errors of log-probabilities, up and down."""
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
    logprob_errors: NDArray[np.float64]
    """float64[N]: recorded log-probability minus this node's own."""
    chunks: list[MeasuredChunk] = field(default_factory=list)
    rollout: Rollout | None = None
    """What was measured, if it is at hand."""

    @cached_property
    def mantissa_mean(self) -> float:
        """Mean over its chunks, each clipped and weighed by its rows."""
        total = sum(chunk.rows * min(chunk.result.mantissa_mean, MANTISSA_CLIP) for chunk in self.chunks)
        return total / self.tokens


@dataclass(frozen=True)
class TokenNumbers:
    """What the tokens of each of several answers come to, one element an answer; all at once, for they are short."""

    tokens: NDArray[np.int64]
    largest_margin: NDArray[np.float64]
    mean_margin: NDArray[np.float64]
    """Of clipped margins."""
    largest_logprob_error: NDArray[np.float64]
    mean_logprob_error: NDArray[np.float64]
    """Of the clipped errors' sizes: noise of any kind shows here."""
    logprob_shift: NDArray[np.float64]
    """Mean of the clipped errors with their signs: rounding cancels out in it, a bias does not."""

    def mean(self, of_answers: NDArray[np.float64]) -> float:
        """Mean over all tokens, from the means of the answers."""
        return float(of_answers @ self.tokens / self.tokens.sum())


def token_numbers(measured: Sequence[MeasuredRollout]) -> TokenNumbers:
    """The numbers of at least one answer; each has at least one token."""
    tokens = np.array([rollout.tokens for rollout in measured])
    starts = np.cumsum(tokens) - tokens
    margins = np.concatenate([rollout.margins for rollout in measured]).astype(np.float64)
    errors = np.concatenate([rollout.logprob_errors for rollout in measured])
    sizes = np.abs(errors)
    return TokenNumbers(
        tokens=tokens,
        largest_margin=np.maximum.reduceat(margins, starts),
        mean_margin=np.add.reduceat(np.minimum(margins, MARGIN_CLIP), starts) / tokens,
        largest_logprob_error=np.maximum.reduceat(sizes, starts),
        mean_logprob_error=np.add.reduceat(np.minimum(sizes, LOGPROB_CLIP), starts) / tokens,
        logprob_shift=np.add.reduceat(np.clip(errors, -LOGPROB_CLIP, LOGPROB_CLIP), starts) / tokens,
    )


Evidence = tuple[float, float, float]
"""Of the answers to one prompt: mean margin, mantissa mean, size of the mean error of log-probabilities."""


def evidence(measured: Sequence[MeasuredRollout]) -> list[Evidence]:
    """What the answers to each prompt give to the test over many submissions.

    By prompt, because answers to one prompt may be alike, or begin alike, and depart alike.
    """
    if not measured:
        return []
    groups: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(measured):
        groups[number if each.rollout is None else each.rollout.prompt_index].append(number)
    numbers = token_numbers(measured)
    return [
        (
            float(numbers.mean_margin[group].mean()),
            sum(measured[number].mantissa_mean for number in group) / len(group),
            abs(float(numbers.logprob_shift[group].mean())),
        )
        for group in groups.values()
    ]


class Measurer:
    """Measures the rollouts of one submission. `broken` says that the policy gives logits that are not finite."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        noise_seed: Callable[[int, int], bytes],
        *,
        temperature: float,
        top_k: int,
        vocab_size: int,
    ) -> None:
        """`noise_seed` gives the seed of the noise of (prompt index, member)."""
        self.broken = False
        self._rollouts = rollouts
        self._noise_seed = noise_seed
        self._temperature = temperature
        self._top_k = top_k
        self._tile_rows = max(1, _TILE_LOGITS // vocab_size)
        self._measured = [_unmeasured(rollout) for rollout in rollouts]
        self._rows: list[tuple[int, slice, NDArray[np.float32]]] = []
        """Rollout, its rows, their logits: what waits to be compared."""
        self._waiting_rows = 0
        self._patterns: list[tuple[int, NDArray[np.uint16]]] = []
        self._waiting_values = 0

    def add(self, prefill: Prefill) -> None:
        """Take one answer's pass into account, at once or together with later ones."""
        count = len(prefill.patterns)
        for start in range(0, count, self._tile_rows):
            part = slice(start, min(count, start + self._tile_rows))
            self._rows.append((prefill.index, part, prefill.logits(part.start, part.stop)))
            self._waiting_rows += part.stop - part.start
            if self._waiting_rows >= self._tile_rows:
                self._compare()
        self._patterns.append((prefill.index, prefill.patterns))
        self._waiting_values += prefill.patterns.size
        if self._waiting_values >= _TILE_VALUES:
            self._verify()

    def results(self) -> list[MeasuredRollout]:
        """The numbers of every rollout, in order, once all were added."""
        self._compare()
        self._verify()
        return self._measured

    def _compare(self) -> None:
        """Margins and log-probabilities of the rows that wait."""
        waiting, self._rows, self._waiting_rows = self._rows, [], 0
        if not waiting:
            return
        logits = np.concatenate([logits for _, _, logits in waiting]) if len(waiting) > 1 else waiting[0][2]
        if not np.isfinite(logits).all():
            self.broken = True
            return
        tokens = np.concatenate([self._rollouts[index].output_ids[part] for index, part, _ in waiting])
        keys = np.concatenate([self._keys(index, part) for index, part, _ in waiting])
        lost = margins(logits, tokens, keys=keys, temperature=self._temperature)
        logprobs = _logprobs(logits, tokens, temperature=self._temperature)
        start = 0
        for index, part, _ in waiting:
            stop = start + part.stop - part.start
            measured, recorded = self._measured[index], np.array(self._rollouts[index].logprobs[part])
            measured.margins[part] = lost[start:stop]
            measured.logprob_errors[part] = recorded - logprobs[start:stop]
            start = stop

    def _keys(self, index: int, part: slice) -> NDArray[np.uint32]:
        rollout = self._rollouts[index]
        return position_keys(self._noise_seed(rollout.prompt_index, rollout.member), part.stop)[part]

    def _verify(self) -> None:
        """The proofs of the rollouts that wait, those of as many rows together."""
        waiting, self._patterns, self._waiting_values = self._patterns, [], 0
        by_rows: dict[int, list[tuple[int, NDArray[np.uint16], bytes]]] = defaultdict(list)
        for index, patterns in waiting:
            for number, proof in enumerate(self._rollouts[index].proofs):
                chunk = patterns[number * PROOF_CHUNK_TOKENS : (number + 1) * PROOF_CHUNK_TOKENS]
                by_rows[len(chunk)].append((index, chunk, proof))
        for rows in sorted(by_rows, reverse=True):  # a rollout's full chunks before its short last one
            chunks = np.stack([chunk for _, chunk, _ in by_rows[rows]])
            results = _verify_chunks(chunks, [proof for _, _, proof in by_rows[rows]], self._top_k)
            points = min(self._top_k, rows * chunks.shape[2])
            for (index, _, _), result in zip(by_rows[rows], results, strict=True):
                self._measured[index].chunks.append(MeasuredChunk(rows, points, result))


def _unmeasured(rollout: Rollout) -> MeasuredRollout:
    count = len(rollout.output_ids)
    return MeasuredRollout(count, np.full(count, np.inf, np.float32), np.full(count, np.inf), rollout=rollout)


def _verify_chunks(chunks: NDArray[np.uint16], proofs: Sequence[bytes], top_k: int) -> list[ChunkResult]:
    """A result per chunk of uint16[chunks, rows, H], all of as many rows.

    Verifying many chunks together is many times cheaper. A proof knows only the place of a value in its chunk, so a
    short chunk may be seen as a full one of narrower rows where its values divide into as many rows.
    """
    count, rows, width = chunks.shape
    if rows * width % PROOF_CHUNK_TOKENS == 0:
        return verify_proofs(chunks.reshape(count * PROOF_CHUNK_TOKENS, -1), proofs, top_k)
    pairs = zip(chunks, proofs, strict=True)
    return [result for chunk, proof in pairs for result in verify_proofs(chunk, [proof], top_k)]


def _logprobs(logits: NDArray[np.float32], tokens: NDArray[np.int64], *, temperature: float) -> NDArray[np.float64]:
    """log_softmax(logits / temperature) of each row's token, float64[N]."""
    scaled = logits / np.float32(temperature)
    scaled -= scaled.max(axis=1, keepdims=True)
    chosen: NDArray[np.float64] = scaled[np.arange(len(tokens)), tokens].astype(np.float64)
    totals: NDArray[np.float64] = np.exp(scaled, out=scaled).sum(axis=1, dtype=np.float64)
    chosen -= np.log(totals)
    return chosen
