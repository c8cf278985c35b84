"""What an inference engine is: the small interface that the built-in engine and vLLM both keep.

An engine knows token ids only: no text, no tokenizer, no rewards. Rows of hidden states are the final-norm outputs that
produced each emitted token (positions P-1 … P+N-2 of a prompt of P tokens and an answer of N), so that generating and
checking speak of the same N rows (TOPLOC section 4). Engines are made by node.engines.registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ModelError

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


class GenerationStream(ABC):
    """Answers under way: an iterator of (index of the request, answer), each as soon as it is finished, in any order.

    The engine does nothing else until the stream is used up or closed. Iterating raises ModelError.
    """

    def __iter__(self) -> Iterator[tuple[int, Generation]]:
        return self

    @abstractmethod
    def __next__(self) -> tuple[int, Generation]: ...

    @abstractmethod
    def cancel(self, *indices: int) -> None:
        """Give up these requests, finished or not: none of them comes any more. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Give up the rest and free what it holds."""


class Engine(ABC):
    """Runs one policy. Every method raises ModelError where the model or the request cannot be used.

    One thread at a time uses an engine. What it is given of memory it keeps to; running out of it lowers `max_batch`
    and loses no request, and raises ModelError only where not even one sequence fits.
    """

    max_batch: int
    """Most sequences that are decoded together. May be set between calls."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def load(self, model_dir: Path) -> None:
        """Hold the policy in a transformers-format directory, whatever was held before. A failure changes nothing."""

    @abstractmethod
    def update(self, model_dir: Path) -> None:
        """Take other weights of the policy that is held, in the same memory; nothing computed before is reused.

        Without a policy it loads one. Raises ModelError for another architecture and for files that do not fit, and
        changes nothing then; a file that cannot be read any more half-way leaves no policy, never a mixed one.
        """

    @abstractmethod
    def stream(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> GenerationStream:
        """Begin to answer requests. What one of them gets does not depend on the others."""

    @abstractmethod
    def prefill(self, sequences: Sequences) -> Iterator[Prefill]:
        """Compute each sequence in one pass, yielding as batches finish, in any order."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        """Answer every request, in order."""
        with closing(self.stream(requests, sampling, progress=progress)) as stream:
            answers = dict(stream)
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing but memory
        """Let go of the policy and of whatever the engine started."""


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ModelError for parameters that no answer can be drawn with."""
    if not sampling.temperature > 0 or sampling.max_new_tokens < 1 or sampling.top_k_proof < 0:
        raise ModelError(f"answers cannot be drawn with {sampling}")


def check_request(info: EngineInfo, request: GenerationRequest, sampling: SamplingParams) -> None:
    """Raise ModelError for a prompt that does not fit the policy."""
    _check_ids(info, request.prompt_ids, to_come=sampling.max_new_tokens)


def check_sequence(info: EngineInfo, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
    """Raise ModelError for a finished sequence that does not fit the policy."""
    if not output_ids:
        raise ModelError("a sequence needs a prompt token at least, and an output token to be checked")
    _check_ids(info, (*prompt_ids, *output_ids) if prompt_ids else (), to_come=0)


def _check_ids(info: EngineInfo, ids: Sequence[int], *, to_come: int) -> None:
    if not ids:
        raise ModelError("a sequence needs a prompt token at least, and an output token to be checked")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise ModelError(f"a token id lies outside the policy's vocabulary of {info.vocab_size}")
    if len(ids) + to_come > info.max_model_len:
        raise ModelError(
            f"{len(ids)} tokens and {to_come} to come exceed the policy's {info.max_model_len} positions",
            hint="the run needs a model with a longer context, or a smaller rollout.max_new_tokens in its recipe",
        )
