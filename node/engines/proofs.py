"""Proofs of answers while they are generated: the rows of each answer's current chunk, proved when it is full.

Beside a device the proofs are computed in a thread, so that the next step need not wait for them. What a proof is
stands in protocol.toploc.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.constants import PROOF_CHUNK_TOKENS
from protocol.toploc import build_chunks

Proofs = list[tuple[Future[list[bytes]], int]]
"""Of one answer, each as a place in what a call of build_chunks gives."""


class ProofRecorder:
    """Proves the answers in so many slots, each the place of one answer under way."""

    def __init__(self, slots: int, hidden_size: int, *, top_k: int, threaded: bool) -> None:
        """`top_k` 0 makes no proofs. With `threaded` they are computed in a thread until `close`."""
        self._top_k = top_k
        self._chunk = np.empty((slots if top_k else 0, PROOF_CHUNK_TOKENS, hidden_size), np.uint16)
        self._proofs: list[Proofs] = [[] for _ in range(slots)]
        self._thread = ThreadPoolExecutor(1, "proofs") if threaded and top_k else None

    def add(
        self, hidden: Tensor, slots: NDArray[np.int64], steps: NDArray[np.int64], *, ends: NDArray[np.bool_]
    ) -> None:
        """Take the states [rows, H] that drew a token of each slot: its number in the answer, and if it is the last."""
        if not self._top_k:
            return
        rows = steps % PROOF_CHUNK_TOKENS
        self._chunk[slots, rows] = patterns(hidden)
        closing = ends | (rows == PROOF_CHUNK_TOKENS - 1)
        if closing.any():
            for count in np.unique(rows[closing]):
                self._prove(slots[closing & (rows == count)], int(count) + 1)

    def take(self, slot: int) -> Proofs:
        """The proofs of the answer in a slot, which is free for another one then."""
        proofs, self._proofs[slot] = self._proofs[slot], []
        return proofs

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _prove(self, slots: NDArray[np.int64], rows: int) -> None:
        """Chunks of as many rows together."""
        chunks = self._chunk[slots, :rows]
        proved: Future[list[bytes]] = Future()
        if self._thread is not None:
            proved = self._thread.submit(build_chunks, chunks, self._top_k)
        else:
            proved.set_result(build_chunks(chunks, self._top_k))
        for place, slot in enumerate(slots):
            self._proofs[slot].append((proved, place))


def proofs_of(proofs: Proofs) -> list[bytes]:
    """Wait for an answer's proofs. Raises what building them raised."""
    return [proved.result()[place] for proved, place in proofs]


def are_done(proofs: Proofs) -> bool:
    return all(proved.done() for proved, _ in proofs)


def patterns(hidden: Tensor) -> NDArray[np.uint16]:
    """bf16 bit patterns of hidden states, rounded to nearest even: protocol.toploc.bf16_patterns on any device."""
    bits: NDArray[np.uint16] = hidden.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
    return bits
