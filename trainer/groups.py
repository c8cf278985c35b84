"""From rollouts as they were handed in to groups that can be trained on (INTELLECT-2, section 3.3).

Checks what the loss relies on, whatever was checked before: whole groups of one prompt, sane numbers, bounded
staleness. Leaves out proofs and rewards' truth, which validators have judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from protocol.errors import MalformedError
from protocol.rollouts import emitted_spans
from trainer.grpo import Advantage, group_advantages
from trainer.packing import Pair

_LOGPROB_TOLERANCE = 1e-3


class TrainingRollout(msgspec.Struct, frozen=True, kw_only=True):
    """What learning needs of a rollout; other fields of the mapping it is read from are ignored."""

    prompt_index: int
    member: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    reward: float
    """NaN where the environment could not tell: left out of its group."""
    checkpoint_step: int
    submission: str = ""
    """Where the rollout was handed in; prompts are numbered within it."""
    length_penalty: float = 0.0
    """What `reward` lost of the task's for missing the length that was asked for."""
    turns: list[int] = []
    """As in protocol.rollouts.Rollout: what lies between turns was not emitted, and nothing is learnt from it."""


@dataclass(frozen=True)
class Sample:
    """A rollout with its advantage."""

    rollout: TrainingRollout
    advantage: float

    @property
    def group(self) -> tuple[str, int]:
        """Which of a batch's groups it belongs to."""
        return self.rollout.submission, self.rollout.prompt_index

    @property
    def pair(self) -> Pair:
        return self.rollout.prompt_ids, self.rollout.output_ids


@dataclass(frozen=True)
class TrainingBatch:
    """Samples of one training step, and what is worth knowing about all rollouts that came in."""

    samples: list[Sample]
    rollouts: int
    mean_reward: float
    mean_task_reward: float
    """Before what missed lengths cost."""
    mean_staleness: float
    staleness_max: int
    tokens: int
    groups_without_signal: int
    rollouts_without_reward: int
    """Left out because the environment could not tell."""


def read_rollouts(items: Sequence[Mapping[str, Any]], *, vocab_size: int, max_length: int) -> list[TrainingRollout]:
    """Decode and check rollouts. Raises MalformedError, also for an empty batch."""
    if not items:
        raise MalformedError("the batch holds no rollouts; there is nothing to train on")
    try:
        rollouts = [msgspec.convert(item, TrainingRollout) for item in items]
    except msgspec.ValidationError as error:
        raise MalformedError(f"a rollout of the batch is not well formed: {error}") from error
    for rollout in rollouts:
        _check_rollout(rollout, vocab_size, max_length)
    return rollouts


def _check_rollout(rollout: TrainingRollout, vocab_size: int, max_length: int) -> None:
    label = f"rollout {rollout.prompt_index}/{rollout.member}"
    if not rollout.prompt_ids or not rollout.output_ids:
        raise MalformedError(f"{label} has an empty prompt or no output")
    if len(rollout.logprobs) != len(rollout.output_ids):
        raise MalformedError(f"{label} has {len(rollout.output_ids)} tokens but {len(rollout.logprobs)} probabilities")
    length = len(rollout.prompt_ids) + len(rollout.output_ids)
    if length > max_length:
        raise MalformedError(f"{label} has {length} tokens, and the model has positions for {max_length}")
    emitted_spans(len(rollout.output_ids), rollout.turns)
    tokens = (*rollout.prompt_ids, *rollout.output_ids)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise MalformedError(f"{label} has a token outside the vocabulary of {vocab_size}")
    if not (math.isfinite(sum(rollout.logprobs)) and max(rollout.logprobs) <= _LOGPROB_TOLERANCE):
        raise MalformedError(f"{label} has a log-probability that is not a finite number below zero")
    if math.isinf(rollout.reward) or not math.isfinite(rollout.length_penalty):
        raise MalformedError(f"{label} has the reward {rollout.reward} and the penalty {rollout.length_penalty}")


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


def _turns(rollout: TrainingRollout) -> Iterator[TrainingRollout]:
    """What the policy emitted, turn by turn; all that came before a turn is its prompt."""
    if not rollout.turns:
        yield rollout
        return
    for start, stop in emitted_spans(len(rollout.output_ids), rollout.turns):
        yield msgspec.structs.replace(
            rollout,
            prompt_ids=rollout.prompt_ids + rollout.output_ids[:start],
            output_ids=rollout.output_ids[start:stop],
            logprobs=rollout.logprobs[start:stop],
            turns=[],
        )


def _emitted(rollout: TrainingRollout) -> int:
    """Tokens of an answer that the policy emitted: those of replies are not its own."""
    return sum(stop - start for start, stop in emitted_spans(len(rollout.output_ids), rollout.turns))


def _staleness(rollout: TrainingRollout, step: int, most: int) -> int:
    staleness = step - rollout.checkpoint_step
    if not 0 <= staleness <= most:
        raise MalformedError(
            f"a rollout of policy {rollout.checkpoint_step} cannot train step {step}: "
            f"at most {most} steps of staleness are allowed"
        )
    return staleness


def assemble_batch(
    items: Sequence[Mapping[str, Any]],
    *,
    step: int,
    group_size: int,
    max_staleness: int,
    vocab_size: int,
    max_length: int,
    advantage: Advantage,
    drop_without_signal: bool,
) -> TrainingBatch:
    """Everything between rollouts and the loss. Raises MalformedError."""
    rollouts = read_rollouts(items, vocab_size=vocab_size, max_length=max_length)
    groups = make_groups(rollouts, group_size)
    staleness = [_staleness(rollout, step, max_staleness) for rollout in rollouts]
    told = [rollout for rollout in rollouts if not math.isnan(rollout.reward)]
    advantages = _advantages(groups, advantage)
    silent = [not any(values) for values in advantages]
    samples = [
        Sample(turn, value)
        for group, values, quiet in zip(groups, advantages, silent, strict=True)
        if not (quiet and drop_without_signal)
        for rollout, value in zip(group, values, strict=True)
        if not math.isnan(rollout.reward)
        for turn in _turns(rollout)
    ]
    return TrainingBatch(
        samples=samples,
        rollouts=len(rollouts),
        mean_reward=_mean([rollout.reward for rollout in told]),
        mean_task_reward=_mean([rollout.reward + rollout.length_penalty for rollout in told]),
        mean_staleness=sum(staleness) / len(rollouts),
        staleness_max=max(staleness),
        tokens=sum(map(_emitted, rollouts)),
        groups_without_signal=sum(silent),
        rollouts_without_reward=len(rollouts) - len(told),
    )


def _advantages(groups: Sequence[Sequence[TrainingRollout]], kind: Advantage) -> list[list[float]]:
    """Of each group, 0 for a rollout without a reward, and for all of a group where fewer than two have one."""
    whole = [place for place, group in enumerate(groups) if not any(math.isnan(rollout.reward) for rollout in group)]
    found = dict(zip(whole, _group_advantages([groups[place] for place in whole], kind), strict=True))
    for place, group in enumerate(groups):
        if place not in found:
            told = [rollout for rollout in group if not math.isnan(rollout.reward)]
            values = iter(_group_advantages([told], kind)[0] if len(told) > 1 else [0.0] * len(told))
            found[place] = [0.0 if math.isnan(rollout.reward) else next(values) for rollout in group]
    return [found[place] for place in range(len(groups))]


def _group_advantages(groups: Sequence[Sequence[TrainingRollout]], kind: Advantage) -> list[list[float]]:
    if not groups:
        return []
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    lengths = torch.tensor([[_emitted(rollout) for rollout in group] for group in groups])
    advantages: list[list[float]] = group_advantages(rewards, kind=kind, lengths=lengths).tolist()
    return advantages


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
