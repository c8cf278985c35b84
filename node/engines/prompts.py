"""Prompts that several answers share are computed once: for generating, and for checking a group's answers.

Prompts are left-padded, so that the answers of all rows begin in the same column of the cache. Leaves out sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from node.engines.decoder import Decoder, KVCache

PASS_TOKENS: Final = 16384
"""Most positions, padding included, of one forward pass over prompts or finished sequences."""
_WORTHWHILE: Final = 0.9
"""Share of the positions that must remain at most for sharing prompts, which needs a mask, to be quicker."""
_MOST_MASK: Final = 1 << 27
"""Entries of a mask."""


@dataclass(frozen=True)
class PromptStates:
    """What a decoder knows after reading prompts, a row for each answer."""

    cache: KVCache
    padding: Tensor
    """Columns in front of each row's prompt, int64[rows]."""
    hidden: Tensor
    """Final hidden state of each prompt's last token, [rows, H]."""


def read_prompts(decoder: Decoder, prompts: Sequence[tuple[int, ...]], *, room: int) -> PromptStates:
    """Read the prompt of every row, each different one once, and leave room for so many tokens behind it."""
    unique = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    longest = max(map(len, unique))
    device = decoder.embedding.device
    padding = torch.tensor([longest - len(prompt) for prompt in unique], device=device)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in unique], device=device)
    cache = KVCache.empty(decoder.config, len(unique), capacity=longest, like=decoder.embedding)
    rows_per_pass = max(1, PASS_TOKENS // longest)
    hidden = []
    for start in range(0, len(unique), rows_per_pass):
        part = slice(start, start + rows_per_pass)
        hidden.append(_read_pass(decoder, tokens[part], padding[part], cache.part(start, start + len(tokens[part]))))
    cache.advance(longest)
    expand = torch.tensor([unique[prompt] for prompt in prompts], device=device)
    return PromptStates(cache.select(expand, capacity=longest + room), padding[expand], torch.cat(hidden)[expand])


def _read_pass(decoder: Decoder, tokens: Tensor, padding: Tensor, cache: KVCache) -> Tensor:
    """Last hidden state of each prompt [rows, H]."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    positions = (columns[None] - padding[:, None]).clamp(min=0)
    mask = None
    if padding.any():
        before = columns[None, :] <= columns[:, None]
        real = columns[None, None, :] >= padding[:, None, None]
        itself = torch.eye(len(columns), dtype=torch.bool, device=tokens.device)
        mask = (before & real | itself)[:, None]
    return decoder.forward(tokens, positions, cache=cache, mask=mask)[:, -1]


def answer_states(decoder: Decoder, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Hidden states [rows, N, H] that produced each answer's tokens; of an answer shorter than N the first rows count.

    `sequences` are (prompt ids, output ids).
    """
    prompts = [tuple(prompt) for prompt, _ in sequences]
    longest = max(map(len, prompts))
    most = max(len(output) for _, output in sequences) - 1
    whole = max(len(prompt) + len(output) - 1 for prompt, output in sequences)
    shared = len(set(prompts)) * longest + len(prompts) * most
    mask = len(prompts) * most * (longest + most)
    if shared <= _WORTHWHILE * len(prompts) * whole and mask <= _MOST_MASK:
        return _behind_shared_prompts(decoder, prompts, [output[:-1] for _, output in sequences])
    return _each_whole(decoder, sequences, whole, most + 1)


def _each_whole(
    decoder: Decoder, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int, most: int
) -> Tensor:
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, (prompt, output) in enumerate(sequences):
        tokens[row, : len(prompt) + len(output) - 1] = torch.tensor([*prompt, *output[:-1]])
    positions = torch.arange(longest).expand(len(sequences), -1)
    device = decoder.embedding.device
    hidden = decoder.forward(tokens.to(device), positions.to(device))
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in sequences], device=device)
    columns = (starts[:, None] + torch.arange(most, device=device)).clamp(max=longest - 1)
    return hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))


def _behind_shared_prompts(
    decoder: Decoder, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[int]]
) -> Tensor:
    most = max(map(len, answers))
    states = read_prompts(decoder, prompts, room=most)
    if not most:
        return states.hidden[:, None]
    device = decoder.embedding.device
    tokens = torch.tensor([[*answer, *[0] * (most - len(answer))] for answer in answers], device=device)
    length = states.cache.length
    columns = torch.arange(length + most, device=device)
    rows = torch.arange(length, length + most, device=device)
    real = columns[None] >= states.padding[:, None]
    mask = (columns[None] <= rows[:, None])[None, None] & real[:, None, None]
    positions = rows[None] - states.padding[:, None]
    behind = decoder.forward(tokens, positions, cache=states.cache, mask=mask)
    return torch.cat([states.hidden[:, None], behind], 1)
