"""Credits of a contributor: earned by accepted work, maturing for some steps, mature for good.

An eviction takes what is not yet mature, a reinstatement gives that back; nothing else takes anything, so no balance is
ever negative. Time is the number of steps that the ledger says are trained, never a clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

FOR_GOOD: Final = 1 << 62
"""As a number of trained steps: when the run's last step is trained, all that still matures is mature."""


@dataclass
class Balance:
    """At any time mature + maturing + forfeited is what all the accepted work has earned."""

    mature: int = 0
    maturing: int = 0
    forfeited: int = 0
    """Taken by an eviction that stands."""
    restored: int = 0
    """Given back by reinstatements, all in all; it is in `mature` or `maturing` again."""
    _due: Counter[int] = field(default_factory=Counter)
    """What matures, by the number of trained steps at which it does."""
    _taken: Counter[int] = field(default_factory=Counter)

    @property
    def credits(self) -> int:
        return self.mature + self.maturing

    def earn(self, amount: int, *, due: int) -> None:
        """Accepted work; its credits mature at `due` trained steps. Call `advance` next."""
        self._due[due] += amount
        self.maturing += amount

    def withhold(self, amount: int, *, due: int) -> None:
        """Work that was accepted while its author is evicted: a reinstatement gives it, too."""
        self._taken[due] += amount
        self.forfeited += amount

    def advance(self, trained: int) -> None:
        """So many steps are trained."""
        for due in [due for due in self._due if due <= trained]:
            amount = self._due.pop(due)
            self.maturing -= amount
            self.mature += amount

    def forfeit(self) -> None:
        """An eviction takes what is not mature."""
        self._taken.update(self._due)
        self.forfeited += self.maturing
        self.maturing = 0
        self._due.clear()

    def restore(self) -> None:
        """A reinstatement gives back what evictions took, with the dates that it had. Call `advance` next."""
        self._due.update(self._taken)
        self.maturing += self.forfeited
        self.restored += self.forfeited
        self.forfeited = 0
        self._taken.clear()
