"""Drawing tokens with the protocol's noise (protocol.sampling), and the log-probabilities recorded for them.

On a CPU the noise is numpy's, for several positions at once where the vocabulary is small. Elsewhere it is computed
where the logits are; a logarithm may differ in its last bit there, which the checks allow for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.sampling import gumbel_rows, position_keys

_BLOCK_VALUES: Final = 1 << 16
"""Noise values that are made ahead for all slots together."""
_MOST_AHEAD: Final = 8
"""Positions; what is made ahead for an answer that ends is wasted."""
_LOW: Final = 0xFFFFFFFF


class Draws:
    """Draws for the answers in so many slots."""

    def __init__(
        self, seeds: Sequence[bytes], *, slots: int, vocab_size: int, max_tokens: int, temperature: float
    ) -> None:
        """`seeds` are those of all requests; keys of the position t of request r are derived when r gets a slot."""
        self._seeds = seeds
        self._temperature = temperature
        self._ahead = max(1, min(_MOST_AHEAD, _BLOCK_VALUES // (slots * vocab_size)))
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._keys: list[NDArray[np.uint32]] = [np.empty((0, 2), np.uint32)] * slots
        self._noise = np.empty((slots, self._ahead, vocab_size), np.float32) if self._ahead > 1 else None
        self._phase = 0
        self._joined: list[int] = []

    def join(self, slot: int, request: int) -> None:
        """A request's answer begins in a slot."""
        self._keys[slot] = position_keys(self._seeds[request], self._max_tokens + self._ahead)
        self._joined.append(slot)

    def draw(
        self, logits: Tensor, slots: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and their log-probabilities from logits [rows, V] of the slots, each at its own step."""
        if logits.device.type == "cpu":
            noise = self._noise_of(slots, steps)
            if self._temperature != 1.0:
                noise *= np.float32(self._temperature)
            noise += logits.numpy()
            tokens: NDArray[np.int64] = noise.argmax(axis=1)
            chosen = torch.from_numpy(tokens)
        else:
            noisy = device_noise(self._keys_of(slots, steps), self._vocab_size, device=logits.device)
            chosen = noisy.mul_(self._temperature).add_(logits).argmax(1)
            tokens = chosen.cpu().numpy()
        scaled = logits if self._temperature == 1.0 else logits / self._temperature
        logprobs = torch.log_softmax(scaled, -1).gather(1, chosen[:, None])[:, 0]
        return tokens, logprobs.cpu().numpy()

    def _keys_of(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.uint32]:
        return np.stack([self._keys[slot][step] for slot, step in zip(slots.tolist(), steps.tolist(), strict=True)])

    def _noise_of(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.float32]:
        """A copy, [rows, V]."""
        if self._noise is None:
            return gumbel_rows(self._keys_of(slots, steps), self._vocab_size)
        if self._phase == 0:
            self._make_ahead(slots, steps)
        elif self._joined:
            new = np.isin(slots, self._joined)
            self._make_ahead(slots[new], steps[new])
        noise: NDArray[np.float32] = self._noise[slots, self._phase]
        self._phase = (self._phase + 1) % self._ahead
        self._joined.clear()
        return noise

    def _make_ahead(self, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        count = self._ahead - self._phase
        pairs = zip(slots.tolist(), steps.tolist(), strict=True)
        keys = np.concatenate([self._keys[slot][step : step + count] for slot, step in pairs])
        made = gumbel_rows(keys, self._vocab_size).reshape(len(slots), count, -1)
        if self._noise is not None:
            self._noise[slots, self._phase :] = made


def device_noise(keys: NDArray[np.uint32], vocab_size: int, *, device: torch.device) -> Tensor:
    """protocol.sampling.gumbel_rows of keys uint32[rows, 2], float32 [rows, V], computed on a device."""
    wide = torch.from_numpy(keys.astype(np.int64)).to(device)
    ids = torch.arange(vocab_size, device=device)
    hashed = _mix(_mix(ids ^ wide[:, :1]) ^ wide[:, 1:])
    uniform = (hashed.double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().float()


def _mix(x: Tensor) -> Tensor:
    """Products wrap at 64 bits, which leaves their low 32 bits right."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
