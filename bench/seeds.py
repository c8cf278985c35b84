"""What a few seeds can say: means and differences with 95 % intervals of Student's t, and the verdicts that follow.

A verdict is computed from an interval and from nothing else. With one seed every interval is infinite, and nothing can
be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Final, Literal

Verdict = Literal["reproduced", "not reproduced", "undecided"]

_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""
MOST_NOISE: Final = 0.1
"""Of an interval's half, in rewards: with more, "within noise" would say nothing."""


@dataclass(frozen=True)
class Estimate:
    """A mean and half of its 95 % interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def text(self, *, digits: int = 3, sign: bool = False) -> str:
        """`0.853 ± 0.011`."""
        number = f"{self.mean:{'+' if sign else ''}.{digits}f}".replace("-", "−")
        return f"{number} ± {self.half:.{digits}f}" if math.isfinite(self.half) else number


@dataclass(frozen=True)
class Ratio:
    """How many times as much, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self) -> str:
        """`3.1× (2.8 to 3.4)`; without an interval where there is none, or nothing varies."""
        if not math.isfinite(self.high) or self.low == self.high:
            return f"{self.mean:.3g}×"
        return f"{self.mean:.3g}× ({self.low:.3g} to {self.high:.3g})"


def named(seeds: Sequence[int]) -> str:
    """`Seeds 0, 1, 2.`"""
    return f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."


def t_975(freedom: float) -> float:
    """Student's t at 97.5 %; infinite without a degree of freedom, and rounded up between whole ones."""
    if freedom < 1:
        return math.inf
    return _T_975[min(int(freedom + 1e-9), len(_T_975)) - 1]


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of a figure over seeds."""
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), math.inf)
    return Estimate(fmean(values), t_975(count - 1) * math.sqrt(variance(values) / count))


def difference(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Mean of `values` minus mean of `base`, by Welch: the two may scatter differently."""
    mean = fmean(values) - fmean(base)
    if min(len(values), len(base)) < 2:
        return Estimate(mean, math.inf)
    parts = [variance(one) / len(one) for one in (values, base)]
    total = sum(parts)
    if not total:
        return Estimate(mean, 0.0)
    freedom = total**2 / sum(part**2 / (len(one) - 1) for part, one in zip(parts, (values, base), strict=True))
    return Estimate(mean, t_975(freedom) * math.sqrt(total))


def ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """How many times `base` `values` are, by geometric means."""
    return _as_ratio(difference([math.log(value) for value in values], [math.log(value) for value in base]))


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """The same where each of `values` was measured side by side with the one of `base` at its place."""
    return _as_ratio(estimate([math.log(value / other) for value, other in zip(values, base, strict=True)]))


def _as_ratio(logs: Estimate) -> Ratio:
    high = math.exp(logs.high) if math.isfinite(logs.high) else math.inf
    return Ratio(math.exp(logs.mean), math.exp(logs.low), high)


def is_above(low: float, high: float, line: float) -> Verdict:
    """That a figure with this interval lies above a line."""
    if low > line:
        return "reproduced"
    return "not reproduced" if high <= line else "undecided"


def is_no_worse(gap: Estimate) -> Verdict:
    """That a difference is none, or an advantage, within the noise of the seeds."""
    if gap.half > MOST_NOISE:
        return "undecided"
    return "reproduced" if gap.high >= 0 else "not reproduced"


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """That every part of a claim holds."""
    if "not reproduced" in verdicts:
        return "not reproduced"
    return "undecided" if "undecided" in verdicts else "reproduced"


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    """That some part of a claim holds."""
    if "reproduced" in verdicts:
        return "reproduced"
    return "undecided" if "undecided" in verdicts else "not reproduced"
