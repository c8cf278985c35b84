"""pass@k on held-out prompts, with confidence intervals (INTELLECT-2, section 4).

The estimator is the unbiased one of "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374, section 2.1).
Pure arithmetic: leaves out who generates the answers and who judges them. Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from protocol.errors import ConfigError

SOLVED: Final = 1.0
"""Reward from which on an answer counts as right."""
_Z: Final = 1.959964
"""Standard normal quantile of two-sided 95 %."""


@dataclass(frozen=True)
class Answer:
    """One judged answer."""

    reward: float | None
    """None where the environment could not tell; counts as wrong."""
    tokens: int
    stopped: bool
    """It ended by itself, before the limit of its length."""


class PassAt(Struct, frozen=True):
    """pass@k: how likely one of k answers at least is right, with the ends of its 95 % interval."""

    k: int
    value: float
    low: float
    high: float


class Evaluation(Struct, frozen=True, kw_only=True):
    """A policy's results on one set of prompts."""

    prompts: int
    samples: int
    pass_at: list[PassAt]
    reward: float
    """Mean over all answers; one that could not be judged counts 0."""
    tokens: float
    """Mean length of an answer."""
    truncated: float
    """Share of answers that were cut at the limit of their length."""
    unknown: int
    """Answers that the environment could not judge."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k) for `solved` = c right answers among `samples` = n. Raises ConfigError."""
    if not 0 <= solved <= samples or not 1 <= k <= samples:
        raise ConfigError(f"pass@{k} of {solved} right answers among {samples} does not exist")
    if samples - solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - solved + 1, samples + 1))


def mean_interval(values: Sequence[float], *, samples: int) -> tuple[float, float]:
    """95 % interval of a mean of values in [0, 1], one a prompt, each from `samples` answers.

    Wilson's score interval with the number of independent trials that the scatter between prompts shows: prompts are
    what was drawn, so many answers to few prompts do not narrow it much, and a perfect score keeps a width.
    """
    count = len(values)
    mean = sum(values) / count
    scatter = sum((value - mean) ** 2 for value in values) / max(1, count - 1)
    trials = float(count)
    if 0 < mean < 1:
        most = float(count * samples)
        trials = min(most, max(trials, count * mean * (1 - mean) / scatter)) if scatter else most
    return _wilson(mean, trials)


def _wilson(mean: float, trials: float) -> tuple[float, float]:
    spread = _Z**2 / trials
    centre = (mean + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(mean * (1 - mean) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(groups: Sequence[Sequence[Answer]], *, pass_at: Sequence[int]) -> Evaluation:
    """Results of equally many answers to each prompt. Raises ConfigError where there is nothing to summarise."""
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or not min(sizes):
        raise ConfigError("an evaluation needs equally many answers, one at least, to each of its prompts")
    answers = [answer for group in groups for answer in group]
    return Evaluation(
        prompts=len(groups),
        samples=len(groups[0]),
        pass_at=[_score([_solved(group) for group in groups], len(groups[0]), k) for k in pass_at],
        reward=sum(answer.reward or 0.0 for answer in answers) / len(answers),
        tokens=sum(answer.tokens for answer in answers) / len(answers),
        truncated=sum(not answer.stopped for answer in answers) / len(answers),
        unknown=sum(answer.reward is None for answer in answers),
    )


def _solved(group: Sequence[Answer]) -> int:
    return sum(answer.reward is not None and answer.reward >= SOLVED for answer in group)


def _score(solved: Sequence[int], samples: int, k: int) -> PassAt:
    values = [pass_at_k(samples, count, k) for count in solved]
    low, high = mean_interval(values, samples=samples)
    return PassAt(k, sum(values) / len(values), low, high)
