"""Packing: many rollouts in one row without a token of padding and without attention between them (INTELLECT-2, 3.4).

What is laid out are trees: a prompt and the answers to it that are computed with it. A tree of one answer is a plain
sequence; in a tree of several the prompt is computed once, and each answer sees it and itself. Position ids begin anew
in each tree, and in each answer after its prompt. trainer.attention keeps the trees apart; the model does the rest.
The last token of an answer predicts nothing and is never computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.attention import AttentionPlan, Span, plan_attention, whole_numbers

Layout = Literal["padded", "packed", "shared"]

Tokens = Sequence[int]
Pair = tuple[Tokens, Tokens]
"""A prompt and an answer to it, each of one token at least."""

_PADDING_SHARE: Final = 0.4
"""Most padding in a row of the padded layout: a longer sequence begins the next micro-batch."""


@dataclass(frozen=True)
class Laid:
    """One micro-batch as a model reads it, with N answer tokens to be predicted in it."""

    inputs: Tensor
    """[B, T] token ids; B is 1 unless the layout is padded."""
    positions: Tensor | None
    """[B, T] where they begin anew; None: 0, 1, 2 … in every row."""
    attention: AttentionPlan | None
    """Who sees whom; None: each token sees its row up to itself."""
    keep: int | Tensor
    """The last so many columns, or the columns themselves, whose logits are wanted: [B · U, V] in all."""
    rows: Tensor
    """[N] which of these logits predicts each answer token; two answers may begin at one."""
    targets: Tensor
    """[N] the answer tokens, answer by answer."""
    owner: Tensor
    """[N] to which answer of `members` each belongs."""
    members: tuple[int, ...]
    """The answers that lie here, as indices into the caller's list."""
    tokens: int
    """Of prompts and answers, each prompt counted with every answer: what there is to learn from."""
    slots: int
    """Places that the model computes."""
    padding: int
    """Of them, those that hold no token."""

    def flatten(self, values: Sequence[Sequence[float]]) -> Tensor:
        """[N] per-token values of the answers in the order of `members`."""
        return torch.tensor([value for row in values for value in row], device=self.targets.device)


@dataclass(frozen=True)
class Tree:
    """A prompt with the answers that share its computation, by their number in the caller's list."""

    prompt: Tokens
    answers: tuple[Tokens, ...]
    members: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Tokens that a model computes for it."""
        return len(self.prompt) + sum(len(answer) - 1 for answer in self.answers)


def choose_layout(pairs: Sequence[Pair]) -> Layout:
    """`shared` where several answers have the same prompt and computing it once saves a tenth or more."""
    apart = sum(len(prompt) + len(output) - 1 for prompt, output in pairs)
    together = sum(tree.slots for tree in grow_trees(pairs, max_tokens=apart))
    return "shared" if together <= 0.9 * apart else "packed"


def lay_out(
    pairs: Sequence[Pair], layout: Layout, *, max_tokens: int, ways: int = 1, device: str = "cpu"
) -> list[Laid]:
    """Cut answers into micro-batches of at most `max_tokens` places; one that is longer stands alone.

    For several processes packs are made as many as divides into `ways`, and alike in size.
    """
    if layout == "padded":
        lengths = [len(prompt) + len(output) - 1 for prompt, output in pairs]
        return [pad(pairs, part, device=device) for part in rows_of_like_length(lengths, max_tokens=max_tokens)]
    if layout == "shared":
        trees = grow_trees(pairs, max_tokens=max_tokens)
    if layout == "packed" or len(trees) < ways:  # too few groups would leave processes idle
        trees = [Tree(prompt, (output,), (number,)) for number, (prompt, output) in enumerate(pairs)]
    sizes = [tree.slots for tree in trees]
    bins = (
        first_fit_decreasing(sizes, capacity=max_tokens) if ways == 1 else even(sizes, capacity=max_tokens, ways=ways)
    )
    return [pack([trees[index] for index in part], device=device) for part in bins]


def grow_trees(pairs: Sequence[Pair], *, max_tokens: int) -> list[Tree]:
    """Join the answers to equal prompts, in the order of their first ones; no tree of several exceeds `max_tokens`."""
    members: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        members.setdefault(tuple(prompt), []).append(number)
    trees = []
    for prompt, numbers in members.items():
        for part in _cut(numbers, [len(pairs[number][1]) - 1 for number in numbers], room=max_tokens - len(prompt)):
            trees.append(Tree(prompt, tuple(pairs[number][1] for number in part), tuple(part)))
    return trees


def _cut(numbers: Sequence[int], sizes: Sequence[int], *, room: int) -> Iterator[list[int]]:
    part: list[int] = []
    used = 0
    for number, size in zip(numbers, sizes, strict=True):
        if part and used + size > room:
            yield part
            part, used = [], 0
        part.append(number)
        used += size
    yield part


def first_fit_decreasing(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Indices in bins of at most `capacity`: the largest first, each into the first bin with room for it.

    A size above the capacity gets a bin of its own. At most 11/9 of the fewest possible bins, and one.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        place = next((number for number, left in enumerate(room) if left >= sizes[index]), None)
        if place is None:
            bins.append([index])
            room.append(capacity - sizes[index])
        else:
            bins[place].append(index)
            room[place] -= sizes[index]
    return bins


def even(sizes: Sequence[int], *, capacity: int, ways: int) -> list[list[int]]:
    """Indices in a multiple of `ways` bins of at most `capacity`: the largest first, each into the emptiest bin.

    Fewer bins where there are fewer sizes, and larger ones where a size is larger.
    """
    count = ways * max(1, -(-sum(sizes) // (capacity * ways)))
    while True:
        bins: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
        emptiest = [(0, number) for number in range(len(bins))]
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
            held, number = heapq.heappop(emptiest)
            bins[number].append(index)
            heapq.heappush(emptiest, (held + sizes[index], number))
        if len(bins) == len(sizes) or max(held for held, _ in emptiest) <= max(capacity, *sizes):
            return bins
        count += ways


def rows_of_like_length(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices by rising length, cut where padding them to one length would exceed `max_tokens` or waste much."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        length = lengths[index]
        current = batches[-1] if batches else []
        fits = current and (len(current) + 1) * length <= max_tokens
        if fits and lengths[current[0]] >= (1 - _PADDING_SHARE) * length:
            current.append(index)
        else:
            batches.append([index])
    return batches


def pack(trees: Sequence[Tree], *, device: str = "cpu") -> Laid:
    """Lay trees one after another into a single row."""
    starts = list(accumulate((tree.slots for tree in trees), initial=0))
    inputs: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    keep: list[int] = []
    rows: list[int] = []
    for tree, start in zip(trees, starts, strict=False):
        stem = len(tree.prompt)
        first_row = len(keep)
        inputs.extend(tree.prompt)
        positions.extend(range(stem))
        keep.append(start + stem - 1)
        spans.extend(_spans(tree, start))
        for answer in tree.answers:
            rows.append(first_row)
            rows.extend(range(len(keep), len(keep) + len(answer) - 1))
            keep.extend(range(len(inputs), len(inputs) + len(answer) - 1))
            inputs.extend(answer[:-1])
            positions.extend(range(stem, stem + len(answer) - 1))
    answers = [answer for tree in trees for answer in tree.answers]
    return Laid(
        inputs=whole_numbers(inputs, device)[None],
        positions=whole_numbers(positions, device)[None],
        attention=plan_attention(spans, device=device),
        keep=whole_numbers(keep, device),
        rows=whole_numbers(rows, device),
        **_targets(answers, device=device),
        members=tuple(member for tree in trees for member in tree.members),
        tokens=sum(len(tree.prompt) * len(tree.answers) for tree in trees) + sum(map(len, answers)),
        slots=len(inputs),
        padding=0,
    )


def _spans(tree: Tree, start: int) -> Iterator[Span]:
    """What of a tree's row attends together: one answer goes on where its prompt ends, several look back at it."""
    stem = len(tree.prompt)
    if len(tree.answers) == 1:
        yield Span(start, tree.slots)
        return
    yield Span(start, stem)
    at = start + stem
    for answer in tree.answers:
        if len(answer) > 1:
            yield Span(at, len(answer) - 1, start, stem)
        at += len(answer) - 1


def pad(pairs: Sequence[Pair], members: Sequence[int], *, device: str = "cpu") -> Laid:
    """Lay chosen answers one a row, padded on the right, where causal attention never looks."""
    chosen = [pairs[member] for member in members]
    longest = max(len(prompt) + len(output) - 1 for prompt, output in chosen)
    first = min(len(prompt) for prompt, _ in chosen) - 1
    width = longest - first
    rows: list[int] = []
    lines: list[list[int]] = []
    for number, (prompt, output) in enumerate(chosen):
        line = [*prompt, *output[:-1]]
        begin = number * width + len(prompt) - 1 - first
        rows.extend(range(begin, begin + len(output)))
        lines.append(line + [0] * (longest - len(line)))
    held = sum(len(prompt) + len(output) - 1 for prompt, output in chosen)
    return Laid(
        inputs=whole_numbers(lines, device),
        positions=None,
        attention=None,
        keep=width,
        rows=whole_numbers(rows, device),
        **_targets([output for _, output in chosen], device=device),
        members=tuple(members),
        tokens=held + len(chosen),
        slots=len(chosen) * longest,
        padding=len(chosen) * longest - held,
    )


def _targets(answers: Sequence[Tokens], *, device: str) -> dict[str, Tensor]:
    return {
        "targets": whole_numbers([token for answer in answers for token in answer], device),
        "owner": whole_numbers(np.repeat(np.arange(len(answers)), [len(answer) for answer in answers]), device),
    }
