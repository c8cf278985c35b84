"""Prompts that several answers share are computed once: for generating, and for checking a group's answers.

Prompts are left-padded, so that the answers of all rows begin in the same column of the cache. Leaves out sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from node.engines.decoder import Decoder
from node.engines.kv_cache import KVCache

PASS_TOKENS: Final = 16384
"""Most positions, padding included, of one forward pass over prompts or finished sequences."""
_WORTHWHILE: Final = 0.9
"""Share of the positions that must remain at most for sharing prompts, which needs a mask, to be quicker."""
_MOST_MASK: Final = 1 << 27
"""Entries of a mask."""


@dataclass(frozen=True)
class PromptStates:
    """What a decoder knows after reading different prompts, a row each."""

    prompts: Sequence[tuple[int, ...]]
    cache: KVCache
    padding: Tensor
    """Columns in front of each row's prompt, int64[rows]."""
    hidden: Tensor
    """Final hidden state of each prompt's last token, [rows, H]."""

    def only(self, row: int) -> PromptStates:
        """A copy of one row."""
        rows = torch.tensor([row], device=self.hidden.device)
        return PromptStates([self.prompts[row]], self.cache.select(rows), self.padding[rows], self.hidden[rows])


def read_unique(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], *, pass_tokens: int = PASS_TOKENS
) -> PromptStates:
    """Read different prompts, in passes of at most so many positions, padding included."""
    longest = max(map(len, prompts))
    device = decoder.device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    cache = KVCache.empty(decoder.cache_shape, rows=len(prompts), capacity=longest, like=decoder.embedding)
    rows_per_pass = max(1, pass_tokens // longest)
    hidden = []
    for start in range(0, len(prompts), rows_per_pass):
        part = slice(start, start + rows_per_pass)
        rows = cache.part(start, start + len(tokens[part]))
        hidden.append(_read_pass(decoder, tokens[part], padding[part], rows, pass_tokens=pass_tokens)[:, -1])
    cache.advance(longest)
    return PromptStates(prompts, cache, padding, torch.cat(hidden))


def _read_pass(decoder: Decoder, tokens: Tensor, padding: Tensor, cache: KVCache, *, pass_tokens: int) -> Tensor:
    """Hidden states of the last piece of rows [B, T] that are read a bounded piece of columns after another."""
    columns = max(1, pass_tokens // len(tokens))
    hidden = tokens
    for first in range(0, tokens.shape[1], columns):
        piece = tokens[:, first : first + columns]
        seen = torch.arange(first + piece.shape[1], device=tokens.device)
        positions = (seen[None, first:] - padding[:, None]).clamp(min=0)
        mask = None
        if first or padding.any():
            before = seen[None, :] <= seen[first:, None]
            real = seen[None, None, :] >= padding[:, None, None]
            itself = seen[None, :] == seen[first:, None]
            mask = (before & real | itself)[:, None]
        hidden = decoder.forward(piece, positions, cache=cache, mask=mask)
    return hidden


def answer_states(
    decoder: Decoder, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, pass_tokens: int = PASS_TOKENS
) -> Tensor:
    """Hidden states [rows, N, H] that produced each answer's tokens; of an answer shorter than N the first rows count.

    `sequences` are (prompt ids, output ids).
    """
    prompts = [tuple(prompt) for prompt, _ in sequences]
    longest = max(map(len, prompts))
    most = max(len(output) for _, output in sequences) - 1
    whole = max(len(prompt) + len(output) - 1 for prompt, output in sequences)
    shared = len(set(prompts)) * longest + len(prompts) * most
    mask = len(prompts) * most * (longest + most)
    if shared <= _WORTHWHILE * len(prompts) * whole and mask <= _MOST_MASK and len(prompts) * most <= pass_tokens:
        return _behind_shared_prompts(decoder, prompts, [output[:-1] for _, output in sequences], pass_tokens)
    return _each_whole(decoder, sequences, whole, most + 1, pass_tokens=pass_tokens)


def _each_whole(
    decoder: Decoder,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    longest: int,
    most: int,
    *,
    pass_tokens: int,
) -> Tensor:
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, (prompt, output) in enumerate(sequences):
        tokens[row, : len(prompt) + len(output) - 1] = torch.tensor([*prompt, *output[:-1]])
    hidden = _all_states(decoder, tokens.to(decoder.device), pass_tokens=pass_tokens)
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in sequences], device=decoder.device)
    columns = (starts[:, None] + torch.arange(most, device=decoder.device)).clamp(max=longest - 1)
    return hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))


def _all_states(decoder: Decoder, tokens: Tensor, *, pass_tokens: int) -> Tensor:
    """[B, T, H] of rows without padding in front; in pieces of columns where they are too long for one pass."""
    rows, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(rows, -1)
    if rows * length <= pass_tokens:
        return decoder.forward(tokens, positions)
    cache = KVCache.empty(decoder.cache_shape, rows=rows, capacity=length, like=decoder.embedding)
    columns = max(1, pass_tokens // rows)
    pieces = []
    for first in range(0, length, columns):
        part = slice(first, first + columns)
        seen = torch.arange(min(first + columns, length), device=tokens.device)
        mask = (seen[None, :] <= seen[first:, None])[None, None]
        pieces.append(decoder.forward(tokens[:, part], positions[:, part], cache=cache, mask=mask))
    return torch.cat(pieces, 1)


def _behind_shared_prompts(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[int]], pass_tokens: int
) -> Tensor:
    most = max(map(len, answers))
    unique = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    states = read_unique(decoder, list(unique), pass_tokens=pass_tokens)
    expand = torch.tensor([unique[prompt] for prompt in prompts], device=decoder.device)
    last, padding = states.hidden[expand][:, None], states.padding[expand]
    if not most:
        return last
    tokens = torch.tensor([[*answer, *[0] * (most - len(answer))] for answer in answers], device=decoder.device)
    length = states.cache.length
    cache = states.cache.select(expand, capacity=length + most)
    columns = torch.arange(length + most, device=decoder.device)
    rows = torch.arange(length, length + most, device=decoder.device)
    real = columns[None] >= padding[:, None]
    mask = (columns[None] <= rows[:, None])[None, None] & real[:, None, None]
    behind = decoder.forward(tokens, rows[None] - padding[:, None], cache=cache, mask=mask)
    return torch.cat([last, behind], 1)
