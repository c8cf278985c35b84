"""The cases that a validator has in hand, and which of them may be worked on now.

Bounded: at most MAX_CASES are in memory, the others wait in the docket. No relay may hold more than its share of the
working places, so one that is slow or lies about its files delays its own cases only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from node.validator.docket import Docket, OpenCase
from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.records import Draw, Submission

MAX_CASES: Final = 1024
MAX_AT_ONCE: Final = 8
MAX_OF_RELAY: Final = 3


@dataclass
class Case:
    """An open case and how it goes. Times are the caller's monotonic clock."""

    opened: OpenCase
    began: float
    relays: deque[PeerId]
    """Who has the file; the one to ask next comes first."""
    due: float = 0.0
    busy: bool = False
    crashes: int = 0
    draw: Draw | None = None
    appeal: bytes = b""
    """Id of the appeal that its verdict answers; most answer none."""
    again: bool = False
    """Whether this validator has said before that it could not tell."""

    @property
    def submission(self) -> Signed[Submission]:
        return self.opened.submission


class Cases:
    """Open cases, oldest first."""

    def __init__(self, docket: Docket, clock: Callable[[], float]) -> None:
        self._docket = docket
        self._clock = clock
        self._cases: dict[bytes, Case] = {}
        self._more_on_disk = True
        self._last = 0

    def __len__(self) -> int:
        return len(self._cases)

    def noticed(self, submission_id: bytes, relay: PeerId) -> None:
        """The docket has a new case, or another relay for one."""
        self._more_on_disk = True
        known = self._cases.get(submission_id)
        if known is not None and relay not in known.relays:
            known.relays.append(relay)

    def excuse(self, waited_s: float) -> None:
        """Nobody could be judged for so long, by this computer's own fault: no case has waited for it."""
        for case in self._cases.values():
            case.began += waited_s

    def closed(self, case: Case) -> None:
        self._cases.pop(case.submission.id, None)

    def startable(self, draw: Callable[[Case, float], Draw | None]) -> Iterator[Case]:
        """Cases to begin with now, each of them counted as busy when it is given out.

        `draw` says how a case that has waited so many seconds is checked, or None while nobody can know.
        """
        self._refill()
        now = self._clock()
        busy = Counter(case.relays[0] for case in self._cases.values() if case.busy)
        for case in list(self._cases.values()):
            if busy.total() >= MAX_AT_ONCE:
                return
            if case.busy or case.due > now or busy[case.relays[0]] >= MAX_OF_RELAY:
                continue
            case.draw = case.draw or draw(case, now - case.began)
            if case.draw is not None:
                case.busy = True
                busy[case.relays[0]] += 1
                yield case

    def next_due_s(self) -> float:
        """Seconds until some case that was put off may be tried again."""
        now = self._clock()
        return min((case.due - now for case in self._cases.values() if not case.busy and case.due > now), default=60.0)

    def _refill(self) -> None:
        room = MAX_CASES - len(self._cases)
        if not self._more_on_disk or room <= 0:
            return
        opened = self._docket.opened(room, after=self._last)
        self._more_on_disk = len(opened) == room
        for one in opened:
            self._cases[one.submission.id] = Case(one, self._clock(), deque(one.relays))
            self._last = one.number
