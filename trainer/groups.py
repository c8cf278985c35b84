"""From rollouts as they were handed in to groups that can be trained on (INTELLECT-2, section 3.3).

Checks what the loss relies on, whatever was checked before: whole groups of one prompt, sane numbers, bounded
staleness. Leaves out proofs and rewards' truth, which validators have judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from protocol.errors import MalformedError
from trainer.grpo import group_advantages

_LOGPROB_TOLERANCE = 1e-3


class TrainingRollout(msgspec.Struct, frozen=True, kw_only=True):
    """What learning needs of a rollout; other fields of the mapping it is read from are ignored."""

    prompt_index: int
    member: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    reward: float
    checkpoint_step: int
    submission: str = ""
    """Where the rollout was handed in; prompts are numbered within it."""


@dataclass(frozen=True)
class Sample:
    """A rollout with its advantage."""

    rollout: TrainingRollout
    advantage: float

    @property
    def length(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.output_ids)


@dataclass(frozen=True)
class TrainingBatch:
    """Samples of one training step, and what is worth knowing about all rollouts that came in."""

    samples: list[Sample]
    rollouts: int
    mean_reward: float
    mean_staleness: float
    tokens: int
    groups_without_signal: int


def read_rollouts(items: Sequence[Mapping[str, Any]], *, vocab_size: int) -> list[TrainingRollout]:
    """Decode and check rollouts. Raises MalformedError, also for an empty batch."""
    if not items:
        raise MalformedError("the batch holds no rollouts; there is nothing to train on")
    try:
        rollouts = [msgspec.convert(item, TrainingRollout) for item in items]
    except msgspec.ValidationError as error:
        raise MalformedError(f"a rollout of the batch is not well formed: {error}") from error
    for rollout in rollouts:
        _check_rollout(rollout, vocab_size)
    return rollouts


def _check_rollout(rollout: TrainingRollout, vocab_size: int) -> None:
    label = f"rollout {rollout.prompt_index}/{rollout.member}"
    if not rollout.prompt_ids or not rollout.output_ids:
        raise MalformedError(f"{label} has an empty prompt or no output")
    if len(rollout.logprobs) != len(rollout.output_ids):
        raise MalformedError(f"{label} has {len(rollout.output_ids)} tokens but {len(rollout.logprobs)} probabilities")
    if not all(0 <= token < vocab_size for token in (*rollout.prompt_ids, *rollout.output_ids)):
        raise MalformedError(f"{label} has a token outside the vocabulary of {vocab_size}")
    if not all(math.isfinite(value) and value <= _LOGPROB_TOLERANCE for value in rollout.logprobs):
        raise MalformedError(f"{label} has a log-probability that is not a finite number below zero")
    if not math.isfinite(rollout.reward):
        raise MalformedError(f"{label} has the reward {rollout.reward}")


def make_groups(rollouts: Sequence[TrainingRollout], group_size: int) -> list[list[TrainingRollout]]:
    """Cut a batch into its groups, which lie one after another. Raises MalformedError."""
    if len(rollouts) % group_size:
        raise MalformedError(f"{len(rollouts)} rollouts are not whole groups of {group_size}")
    groups = [list(rollouts[at : at + group_size]) for at in range(0, len(rollouts), group_size)]
    for number, group in enumerate(groups):
        first = group[0]
        if sorted(rollout.member for rollout in group) != list(range(group_size)):
            raise MalformedError(f"group {number} does not hold the members 0 to {group_size - 1} once each")
        if any(_origin(rollout) != _origin(first) for rollout in group):
            raise MalformedError(f"group {number} mixes prompts or policies")
    return groups


def _origin(rollout: TrainingRollout) -> tuple[str, int, int, list[int]]:
    return rollout.submission, rollout.checkpoint_step, rollout.prompt_index, rollout.prompt_ids


def assemble_batch(
    items: Sequence[Mapping[str, Any]],
    *,
    step: int,
    group_size: int,
    max_staleness: int,
    vocab_size: int,
    normalise: bool,
    drop_without_signal: bool,
) -> TrainingBatch:
    """Everything between rollouts and the loss. Raises MalformedError."""
    rollouts = read_rollouts(items, vocab_size=vocab_size)
    groups = make_groups(rollouts, group_size)
    for rollout in rollouts:
        if not 0 <= step - rollout.checkpoint_step <= max_staleness:
            raise MalformedError(
                f"a rollout of policy {rollout.checkpoint_step} cannot train step {step}: "
                f"at most {max_staleness} steps of staleness are allowed"
            )
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    advantages = group_advantages(rewards, normalise=normalise).tolist()
    silent = [not any(values) for values in advantages]
    samples = [
        Sample(rollout, advantage)
        for group, values, quiet in zip(groups, advantages, silent, strict=True)
        if not (quiet and drop_without_signal)
        for rollout, advantage in zip(group, values, strict=True)
    ]
    return TrainingBatch(
        samples=samples,
        rollouts=len(rollouts),
        mean_reward=float(rewards.mean()),
        mean_staleness=sum(step - rollout.checkpoint_step for rollout in rollouts) / len(rollouts),
        tokens=sum(len(rollout.output_ids) for rollout in rollouts),
        groups_without_signal=sum(silent),
    )
