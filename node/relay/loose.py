"""Verdicts about what a relay does not know: a submission that went to another relay, an appeal that is on its way, or
nothing at all.

An honest validator has few of these at a time, and a dishonest one makes as many as it likes. So a relay keeps the
newest of each validator, and what comes beyond takes the place of the same validator's oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

MAX_LOOSE_EACH: Final = 2048
"""Of one validator."""
LEFT: Final = MAX_LOOSE_EACH * 7 // 8
"""Of so many, once they were too many: a look at all of them is not for each one that comes."""


class LooseVerdicts:
    """Counts them; the store has them."""

    def __init__(self, stored: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Validator, verdict and subject of those that an earlier process stored, the oldest first."""
        self._of: dict[bytes, dict[bytes, bytes]] = {}
        for validator, verdict, subject in stored:
            own = self._of.setdefault(validator, {})
            own[verdict] = subject
            if len(own) > LEFT:
                del own[next(iter(own))]

    def add(self, validator: bytes, verdict: bytes, *, subject: bytes, known: Callable[[bytes], bool]) -> list[bytes]:
        """One more; gives the verdicts to forget, if any. `known`: whether a subject is known by now."""
        own = self._of.setdefault(validator, {})
        own[verdict] = subject
        if len(own) <= MAX_LOOSE_EACH:
            return []
        own = self._of[validator] = {key: about for key, about in own.items() if not known(about)}
        oldest = list(own)[: max(0, len(own) - LEFT)]
        for key in oldest:
            del own[key]
        return oldest
