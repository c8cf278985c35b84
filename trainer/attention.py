"""Attention within packed sequences, for transformers models: who may see whom is a plan, not a mask over everything.

Tokens that attend together are gathered into rows of like length, padded for attention alone, and attended in a few
calls; a mask over a whole pack would cost the square of its length. Registered with transformers under NAME; models get
the plan as the argument `attention_plan`. Leaves out sliding windows, which it refuses where they would matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protocol.errors import ModelError

Longs = npt.NDArray[np.int64]

NAME: Final = "intellect_packed"
_SLACK_TOKENS: Final = 16
"""Lengths that differ by no more than this share a call: a call costs more than so much padding."""


class Span(NamedTuple):
    """Tokens of a pack that attend causally to each other, after they have seen all of a prefix."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Block:
    """Spans of like length, attended in one call: S rows of Q queries that see K keys."""

    queries: Tensor
    """[S, Q] places in the pack; padded with place 0."""
    keys: Tensor
    """[S, K]: the prefix padded on the right, then the queries."""
    mask: Tensor | None
    """[S, 1, Q, K], true where a query may look; None: up to itself."""


@dataclass(frozen=True)
class AttentionPlan:
    """All blocks of a pack, and where each of its T tokens lies in their rows laid end to end."""

    blocks: tuple[Block, ...]
    places: Tensor
    """[T]."""
    longest: int
    """Most tokens that one query sees."""


def whole_numbers(values: npt.ArrayLike, device: str) -> Tensor:
    """A tensor of int64; from a list, several times as fast as torch makes one."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)


def plan_attention(spans: Sequence[Span], *, device: str = "cpu") -> AttentionPlan:
    """Spans tile a pack: every token lies in exactly one."""
    places = np.empty(sum(span.length for span in spans), dtype=np.int64)
    blocks = []
    offset = 0
    for part in _like_lengths(spans):
        block, held, queries = _block(np.array(part), device)
        places[queries[held]] = offset + np.flatnonzero(held)
        offset += held.size
        blocks.append(block)
    longest = max(span.length + span.prefix_length for span in spans)
    return AttentionPlan(tuple(blocks), whole_numbers(places, device), longest)


def _like_lengths(spans: Sequence[Span]) -> list[list[Span]]:
    parts: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.prefix_length, span.length, span.start)):
        first = parts[-1][0] if parts else None
        if first is not None and _alike(first, span):
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts


def _alike(first: Span, span: Span) -> bool:
    if bool(first.prefix_length) != bool(span.prefix_length):
        return False
    return all(
        max(one, other) <= max(2 * min(one, other), min(one, other) + _SLACK_TOKENS)
        for one, other in ((first.length, span.length), (first.prefix_length, span.prefix_length))
    )


def _block(spans: Longs, device: str) -> tuple[Block, npt.NDArray[np.bool_], Longs]:
    """A block for spans [S, 4], which of its queries [S, Q] hold a token, and where in the pack they lie."""
    starts, lengths, prefix_starts, prefix_lengths = (spans[:, [column]] for column in range(4))
    columns = np.arange(lengths.max())[None]
    held = columns < lengths
    queries = np.where(held, starts + columns, 0)
    prefix = int(prefix_lengths.max())
    if not prefix:
        places = whole_numbers(queries, device)
        return Block(places, places, None), held, queries
    prefix_columns = np.arange(prefix)[None]
    in_prefix = prefix_columns < prefix_lengths
    keys = np.concatenate([np.where(in_prefix, prefix_starts + prefix_columns, 0), queries], axis=1)
    rows, width = queries.shape
    mask = np.empty((rows, 1, width, prefix + width), dtype=bool)
    mask[..., :prefix] = in_prefix[:, None, None]
    mask[..., prefix:] = np.tri(width, dtype=bool)
    block = Block(whole_numbers(queries, device), whole_numbers(keys, device), torch.from_numpy(mask).to(device))
    return block, held, queries


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: `query` [B, heads, T, D], keys, values [B, kv_heads, T, D] → [B, T, heads, D].

    Without a plan every row attends causally. Raises ModelError for a window shorter than what is attended to.
    """
    longest = query.shape[2] if attention_plan is None else attention_plan.longest
    if sliding_window is not None and longest > sliding_window:
        raise ModelError(
            f"the model attends within a window of {sliding_window} tokens, and a rollout has {longest}",
            hint='set policy.layout = "padded" in the recipe: packing has no windows',
        )
    if query.shape[2] != key.shape[2]:
        raise ModelError("a model that was made ready for packed training cannot decode from a cache")
    if attention_plan is None:
        return _sdpa(query, key, value, None, scaling).transpose(1, 2), None
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
    attended = [_attend_block(block, query, key, value, scaling) for block in attention_plan.blocks]
    whole = attended[0] if len(attended) == 1 else torch.cat(attended)
    return whole.index_select(0, attention_plan.places)[None], None


def _attend_block(block: Block, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """[S · Q, heads, D] of a block's rows."""
    queries, keys, values = _gather(query, block.queries), _gather(key, block.keys), _gather(value, block.keys)
    return _sdpa(queries, keys, values, block.mask, scaling).transpose(1, 2).flatten(0, 1)


def _gather(states: Tensor, places: Tensor) -> Tensor:
    """[T, heads, D] at places [S, L] → [S, heads, L, D]."""
    return states.index_select(0, places.flatten()).view(*places.shape, *states.shape[1:]).transpose(1, 2)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


@contextmanager
def watched() -> Iterator[Callable[[], int]]:
    """Make NAME known to transformers, which then builds no mask for models that use it, and count calls meanwhile."""
    from transformers import AttentionInterface

    calls = 0

    def counted(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
        nonlocal calls
        calls += 1
        return attend(*arguments, **named)

    AttentionInterface.register(NAME, counted)
    try:
        yield lambda: calls
    finally:
        AttentionInterface.register(NAME, attend)
