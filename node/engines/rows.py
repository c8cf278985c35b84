"""Answers under way in the built-in decoder: rows that join and leave a window of keys and values while it moves on.

The text of every row ends at the window's last column. When the columns are used up, the window moves back to the
beginning of the memory; a row that leaves is replaced by the last one. Leaves out what is drawn from the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.decoder import Decoder
from node.engines.kv_cache import KVCache
from node.engines.prompts import PromptStates, read_unique

Prompt = tuple[int, ...]
States = tuple[Tensor, Tensor]
"""Final hidden states [rows, H], and the logits [rows, V] that follow from them."""


class Rows(Protocol):
    """A batch of answers under way, a row each."""

    joins_running: bool
    """Whether rows may join while there are others."""

    def join(self, prompts: Sequence[Prompt], *, to_come: Prompt | None) -> States:
        """Read prompts into new rows behind the others; `to_come` is a prompt that will be asked for once more."""

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Leave only these rows, in this order."""

    def step(self, tokens: NDArray[np.int64]) -> States:
        """Feed each row its token."""


class WindowRows:
    """Rows of the built-in decoder. At most `capacity` rows; no row ever has more than `columns` - 1 tokens."""

    joins_running = True

    def __init__(self, decoder: Decoder, *, capacity: int, columns: int, pass_tokens: int) -> None:
        self._decoder = decoder
        self._pass_tokens = pass_tokens
        self._cache = KVCache.empty(decoder.cache_shape, rows=capacity, capacity=columns, like=decoder.embedding)
        self._first = 0
        self._uneven = False
        self._starts = np.empty(0, np.int64)
        """Column of each row's first token."""
        self._bias = torch.zeros(capacity, decoder.config.kv_heads, 1, columns, device=decoder.device)
        """-inf in front of each row's text."""
        self._device_starts = torch.empty(0, dtype=torch.int64, device=decoder.device)
        self._shelf: tuple[Prompt, PromptStates] | None = None

    @torch.inference_mode()
    def join(self, prompts: Sequence[Prompt], *, to_come: Prompt | None) -> States:
        states = self._read(prompts)
        old, longest = len(self._starts), states.cache.length
        self._make_room(longest)
        end = self._cache.length
        unique = {prompt: row for row, prompt in enumerate(states.prompts)}
        rows = torch.tensor([unique[prompt] for prompt in prompts], device=self._decoder.device)
        self._cache.put(old, states.cache, rows)
        starts = np.array([end - len(prompt) for prompt in prompts])
        self._clear_new_columns(int(starts.min()), end - longest, old=old, new=len(prompts))
        self._set_starts(np.concatenate((self._starts, starts)))
        self._shelve(states, unique, to_come)
        hidden = states.hidden[rows]
        return hidden, self._decoder.logits(states.hidden)[rows]

    @torch.inference_mode()
    def keep(self, rows: NDArray[np.int64]) -> None:
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if len(moved):
            onto, source = (torch.from_numpy(each).to(self._decoder.device) for each in (moved, rows[moved]))
            self._cache.move_rows(source, onto, start=int(self._starts[rows].min()))
        self._set_starts(self._starts[rows])

    @torch.inference_mode()
    def step(self, tokens: NDArray[np.int64]) -> States:
        if self._cache.length == self._cache.capacity:
            self._move_window(0)
        start, end = self._first, self._cache.length
        bias = None
        if self._uneven:
            bias = self._bias[: len(tokens)].flatten(0, 1)[:, :, start : end + 1]
        inputs = torch.from_numpy(tokens).to(self._decoder.device)
        hidden = self._decoder.step(inputs, end - self._device_starts, cache=self._cache, start=start, bias=bias)
        return hidden, self._decoder.logits(hidden)

    def _read(self, prompts: Sequence[Prompt]) -> PromptStates:
        """The states of each different prompt. A shelved one costs nothing where no other is asked for."""
        wanted = list(dict.fromkeys(prompts))
        if self._shelf is not None and wanted == [self._shelf[0]]:
            return self._shelf[1]
        return read_unique(self._decoder, wanted, pass_tokens=self._pass_tokens)

    def _shelve(self, states: PromptStates, unique: dict[Prompt, int], to_come: Prompt | None) -> None:
        """Keep what will be asked for again: a group that does not fit in whole joins in parts."""
        if to_come is None or to_come not in unique:
            self._shelf = None
        elif self._shelf is None or self._shelf[0] != to_come:
            self._shelf = to_come, states.only(unique[to_come])

    def _make_room(self, longest: int) -> None:
        """See to it that so many columns lie in front of the window's end."""
        if not len(self._starts):
            self._cache.length = longest
        elif self._cache.length < longest:
            self._move_window(self._first + longest - self._cache.length)

    def _move_window(self, to: int) -> None:
        by = to - self._first
        self._cache.move_columns(self._first, to)
        self._set_starts(self._starts + by)

    def _clear_new_columns(self, first: int, read_from: int, *, old: int, new: int) -> None:
        """Zeros in columns in front of a row's text that were never written and are looked over from now on."""
        if old and first < self._first:
            self._cache.clear(slice(0, old), slice(first, self._first))
        window = min(first, self._first) if old else first
        if window < read_from:
            self._cache.clear(slice(old, old + new), slice(window, read_from))

    def _set_starts(self, starts: NDArray[np.int64]) -> None:
        self._starts = starts
        if not len(starts):
            return
        self._first = int(starts.min())
        self._uneven = bool((starts != self._first).any())
        self._device_starts = torch.from_numpy(starts).to(self._decoder.device)
        if self._uneven:
            columns = torch.arange(self._first, int(starts.max()), device=self._decoder.device)
            hidden = columns < self._device_starts[:, None]
            part = self._bias[: len(starts), :, :, self._first :]
            part.zero_()
            part[:, :, 0, : len(columns)].masked_fill_(hidden[:, None], -torch.inf)
