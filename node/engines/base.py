"""What an inference engine is: the small interface that the built-in engine and vLLM both keep.

An engine knows token ids only: no text, no tokenizer, no rewards. Rows of hidden states are the final-norm outputs that
produced each emitted token (positions P-1 … P+N-2 of a prompt of P tokens and an answer of N), so that generating and
checking speak of the same N rows (TOPLOC section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
TokenProgress = Callable[[int], None]
"""Called with the number of tokens generated so far."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine runs and on what; goes into submissions and verdicts."""

    name: str
    version: str
    dtype: str
    device: str
    vocab_size: int
    hidden_size: int
    max_model_len: int


@dataclass(frozen=True)
class SamplingParams:
    """How answers are drawn, the same for every request of a batch."""

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    top_k_proof: int
    """Activations that a TOPLOC proof commits to; 0 makes no proofs."""


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to generate. `seed` keys its sampling noise (protocol.sampling)."""

    prompt_ids: Sequence[int]
    seed: bytes


@dataclass(frozen=True)
class Generation:
    """One answer. `output_ids` ends with the stop id where `finish_reason` is "stop"."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    proofs: list[bytes]


@dataclass(frozen=True)
class Prefill:
    """What the policy computes for one finished sequence of N output tokens over H hidden values and V token ids."""

    index: int
    """Position of the sequence in the call."""
    patterns: NDArray[np.uint16]
    """bf16 bit patterns of the N rows, shape [N, H]."""
    logits: Callable[[int, int], NDArray[np.float32]]
    """Logits of the rows start … stop - 1, shape [stop - start, V]: whole they may be larger than memory."""


Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, output ids) of each sequence."""


class Engine(Protocol):
    """Runs one policy. Every method raises ModelError where the model or the request cannot be used."""

    @property
    def info(self) -> EngineInfo: ...

    def load(self, model_dir: Path) -> None:
        """Replace the policy by the one in a transformers-format directory."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        """Answer every request, in order. What one request gets does not depend on the others."""

    def prefill(self, sequences: Sequences) -> Iterator[Prefill]:
        """Compute each sequence in one pass, yielding as batches finish, in any order."""
