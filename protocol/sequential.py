"""A test over everything that one node ever hands in: is a measurement, on average, larger than an honest node's?

Small departures that every single submission may have show in their sum. The test bets against honesty (test by
betting; Ville 1939, Waudby-Smith and Ramdas 2023): with a `bound` that no honest node's next value is expected to
exceed, a value x ≥ 0 multiplies a stake by

    1 - f + f · x / bound

which does not make an honest node's stake grow on average, whatever the distribution of x: skewed, heavy-tailed,
changing with time. A new bet begins with every value, the n-th with a share 1 / (n (n + 1)) of the capital 1, so that a
node that turns dishonest late is found as well; each fraction f of FRACTIONS has an equal part. The chance that an
honest node's capital **ever** reaches 1/α is at most α: the false-positive rate is for the node's whole life.

Stakes are cut at MOST_CAPITAL, which only helps the node: one that mends its ways is believed again. Leaves out what is
measured, the bounds (the manifest's) and what follows (node.validator.suspicion). Pure; a state is a small record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta, Struct

FRACTIONS: Final = (0.02, 0.1, 0.3, 0.7)
"""How much of a stake is risked on each value: small ones find rare large values, large ones a shifted mean."""
MOST_CAPITAL: Final = 1e12
LEAST_BOUND: Final = 1e-6
"""Bounds below this count as this much: rounding alone must not make a fortune of nothing."""

Stake = Annotated[float, Meta(ge=0, le=MOST_CAPITAL)]


class Bets(Struct, frozen=True):
    """Where the test of one node and one measurement stands."""

    values: Annotated[int, Meta(ge=0)] = 0
    """How many were seen."""
    stakes: tuple[Stake, Stake, Stake, Stake] = (0.0, 0.0, 0.0, 0.0)
    """Capital that rides on each fraction of FRACTIONS."""

    @property
    def capital(self) -> float:
        """What the bets have come to, with what is not yet staked: at most 1 on average for an honest node."""
        return sum(self.stakes) + 1.0 / (self.values + 1)


def observe(bets: Bets, values: Iterable[float], *, bound: float) -> Bets:
    """Bet on each value in turn. Values must be finite and at least 0; raises ValueError otherwise."""
    bound = max(bound, LEAST_BOUND)
    count, stakes = bets.values, list(bets.stakes)
    for value in values:
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"no bet can be made on {value}")
        count += 1
        fresh = 1.0 / (count * (count + 1)) / len(FRACTIONS)
        for place, fraction in enumerate(FRACTIONS):
            won = (stakes[place] + fresh) * (1.0 - fraction + fraction * value / bound)
            stakes[place] = min(won, MOST_CAPITAL)
    return Bets(count, (stakes[0], stakes[1], stakes[2], stakes[3]))


def is_unlikely(bets: Bets, rate: float) -> bool:
    """Whether an honest node would ever stand here with a probability of `rate` at most."""
    return bets.capital >= 1.0 / rate
