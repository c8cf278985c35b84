"""What the torch engine runs: the built-in decoder, or transformers' own model (node.engines.transformers_model).

A model knows its sizes, makes batches of rows, and computes finished sequences. Leaves out drawing, proving, checking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.base import Sequences
from node.engines.decoder import Decoder
from node.engines.model_config import read_config
from node.engines.prompts import PASS_TOKENS, answer_states
from node.engines.proofs import patterns
from node.engines.rows import Rows, WindowRows
from node.engines.weights import WeightFiles
from protocol.errors import ModelError

Computed = tuple[int, NDArray[np.uint16], Callable[[int, int], NDArray[np.float32]]]
"""Of a sequence what node.engines.base.Prefill is made of."""
_MOST_ROWS: Final = 64
"""Finished sequences of one pass."""
_FEW_LOGITS: Final = 1 << 20
"""Of all rows of a pass: so few are computed at once, since a product for each answer would cost more."""


class Model(Protocol):
    """A policy in memory. Its methods raise what running out of memory raises."""

    engine: str
    """Name and version of what computes."""
    version: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    token_bytes: int
    """Of one position's keys and values."""
    pass_bytes: int
    """About what one position of a forward pass needs while it lasts."""
    sound: bool
    """False after an update that failed half-way."""

    def update(self, model_dir: Path) -> None:
        """Take other weights. Raises ModelError before anything is changed, or leaves what must not be used."""

    def new_rows(self, capacity: int, columns: int, *, pass_tokens: int) -> Rows: ...

    def compute(self, sequences: Sequences, *, pass_tokens: int) -> Iterator[Computed]:
        """Finished sequences, in any order."""


class BuiltinModel:
    """A Llama-family policy in the built-in decoder."""

    engine = "torch"
    version = str(torch.__version__)

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError; UnsupportedArchitecture where the decoder would compute something else."""
        self.sound = True
        self._dtype = dtype
        self._config = read_config(model_dir)
        self._decoder = Decoder(self._config, WeightFiles(model_dir, self._config, dtype=dtype), device=device)
        self.vocab_size, self.hidden_size = self._config.vocab_size, self._config.hidden_size
        self.max_model_len = self._config.max_model_len
        self.token_bytes, self.pass_bytes = self._decoder.token_bytes, self._decoder.pass_bytes

    def update(self, model_dir: Path) -> None:
        if read_config(model_dir) != self._config:
            raise other_architecture(model_dir)
        weights = WeightFiles(model_dir, self._config, dtype=self._dtype)
        self.sound = False
        self._decoder.update(weights)
        self.sound = True

    def new_rows(self, capacity: int, columns: int, *, pass_tokens: int) -> Rows:
        return WindowRows(self._decoder, capacity=capacity, columns=columns, pass_tokens=pass_tokens)

    def compute(self, sequences: Sequences, *, pass_tokens: int = PASS_TOKENS) -> Iterator[Computed]:
        """Similar lengths together."""
        for part in passes(sequences, pass_tokens=pass_tokens):
            states = answer_states(self._decoder, [sequences[index] for index in part], pass_tokens=pass_tokens)
            bits = patterns(states)
            few = states.shape[0] * states.shape[1] * self.vocab_size <= _FEW_LOGITS
            logits = self._logits(states, 0, len(states)) if few else None
            for row, index in enumerate(part):
                count = len(sequences[index][1])
                later = partial(self._logits, states[row, :count])
                yield index, bits[row, :count], later if logits is None else partial(_rows, logits[row, :count])

    def _logits(self, hidden: Tensor, start: int, stop: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._decoder.logits(hidden[start:stop]).cpu().numpy()
        return logits


def _rows(logits: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
    return logits[start:stop]


def other_architecture(model_dir: Path) -> ModelError:
    return ModelError(
        f"{model_dir} is a model of another architecture than the policy that is held",
        hint="a run keeps one architecture: remove the checkpoint and let the node fetch it again",
    )


def passes(sequences: Sequences, *, pass_tokens: int) -> Iterator[Sequence[int]]:
    """Indices by rising length, cut so that no pass has too many rows or positions."""
    lengths = [len(prompt_ids) + len(output_ids) - 1 for prompt_ids, output_ids in sequences]
    part: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if part and (len(part) == _MOST_ROWS or (len(part) + 1) * lengths[index] > pass_tokens):
            yield part
            part = []
        part.append(index)
    if part:
        yield part
