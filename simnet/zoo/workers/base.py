"""What all cheating workers share: a seed, a directory of their own, and the honest numbers of answers not drawn so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from node.engines.assignment import Work
from node.engines.base import Engine, Generation, SamplingParams
from node.inference.compute import RolloutWorker
from protocol.toploc import build_proofs


class Cheat(RolloutWorker):
    """An honest worker with a seed and a directory for what its subclasses do instead."""

    claimed_dtype = ""
    """The number format that it signs for; empty: the engine's own."""

    def __init__(self, engine: Engine, *, seed: int, directory: Path) -> None:
        super().__init__(engine)
        self.seed = seed
        self.directory = directory

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made = super().generate(*args, **kwargs)
        return made | {"dtype": self.claimed_dtype or made["dtype"]}


def proved(engine: Engine, work: Work, generations: Sequence[Generation], sampling: SamplingParams) -> list[Generation]:
    """The same answers with the log-probabilities and proofs that this engine's policy gives them: one honest pass."""
    prompts = [assignment.prompt_ids for assignment in work.assignments for _ in range(work.group_size)]
    sequences = [(prompt, made.output_ids) for prompt, made in zip(prompts, generations, strict=True)]
    found = list(generations)
    for prefill in engine.prefill(sequences):
        made = generations[prefill.index]
        found[prefill.index] = replace(
            made,
            logprobs=_logprobs(prefill.logits(0, len(made.output_ids)), made.output_ids, sampling.temperature),
            proofs=build_proofs(prefill.patterns, sampling.top_k_proof),
        )
    return found


def _logprobs(logits: NDArray[np.float32], tokens: Sequence[int], temperature: float) -> list[float]:
    scaled = logits / np.float32(temperature)
    scaled -= scaled.max(axis=1, keepdims=True)
    totals = np.log(np.exp(scaled).sum(axis=1, dtype=np.float64))
    values: list[float] = (scaled[np.arange(len(tokens)), tokens] - totals).astype(np.float32).tolist()
    return values
