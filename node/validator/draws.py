"""What a validator knows about draws: the heads it has seen, and how each open case is to be checked.

A case is excused from the costly checks only if the beacon is provably the first head after its receipt, and came
after this validator had seen the submission: a relay that shows a submission late, or dates its receipt back, gains
nothing. Whenever that cannot be shown, the case is checked in full. Leaves out the rules themselves (protocol.draw).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from node.validator.docket import OpenCase
from protocol.draw import beacon_of, check_rate, is_drawn, is_first_after
from protocol.envelope import Signed
from protocol.ledger import LedgerState
from protocol.records import Draw, Head

PATIENCE_S: Final = 30.0
"""A case whose beacon, or the ledger behind it, has not come by then is checked in full."""
MAX_HEADS: Final = 4096
"""Newest heads that are kept; more than two hours of them."""
NEVER_SEEN: Final = 2**53
"""Stands for the newest head where none is known: no beacon can then be shown to have come later."""


class Draws:
    """Fed with every head that comes; asked about cases."""

    def __init__(self, ledger: LedgerState) -> None:
        self._ledger = ledger
        self._heads: list[Signed[Head]] = []
        self._sequences: list[int] = []

    @property
    def newest_sequence(self) -> int:
        return self._sequences[-1] if self._sequences else NEVER_SEEN

    def hear(self, head: Signed[Head]) -> None:
        """Take in a newer head than every one before."""
        self._heads.append(head)
        self._sequences.append(head.record.sequence)
        if len(self._heads) > MAX_HEADS:
            del self._heads[: MAX_HEADS // 2], self._sequences[: MAX_HEADS // 2]

    def heads_since(self, sequence: int) -> int:
        """How many newer heads were seen."""
        return len(self._sequences) - bisect_right(self._sequences, sequence)

    def draw(self, case: OpenCase, *, waited_s: float) -> Draw | None:
        """How a case is checked; None while its beacon or the ledger behind it is still to come."""
        record = self._ledger.record(case.submission.author, self._ledger.length)
        if check_rate(record, self._ledger.manifest.checks) == 1.0:
            return _in_full(case, "rejected before" if record.rejected else "newcomer")
        beacon = self.beacon(case.receipt.record.head_sequence)
        if beacon is None:
            return _in_full(case, "no beacon came") if waited_s > PATIENCE_S else None
        if beacon.record.sequence <= case.seen_sequence or not is_first_after(beacon.record, case.receipt.record):
            return _in_full(case, "seen too late for a draw")
        if beacon.record.ledger_length > self._ledger.length:
            return _in_full(case, "the beacon's ledger did not come") if waited_s > PATIENCE_S else None
        return self._drawn_by(beacon, case)

    def _drawn_by(self, beacon: Signed[Head], case: OpenCase) -> Draw:
        record = self._ledger.record(case.submission.author, beacon.record.ledger_length)
        rate = check_rate(record, self._ledger.manifest.checks)
        drawn = is_drawn(beacon_of(beacon), case.submission.id, rate=rate)
        why = "drawn" if drawn else "not drawn"
        return Draw(drawn=drawn, rate=rate, why=why, beacon=beacon.data, receipt=case.receipt.data)

    def beacon(self, after: int) -> Signed[Head] | None:
        """The first head that was seen with a sequence above `after`."""
        place = bisect_right(self._sequences, after)
        return self._heads[place] if place < len(self._heads) else None


def _in_full(case: OpenCase, why: str) -> Draw:
    return Draw(drawn=True, rate=1.0, why=why, beacon=b"", receipt=case.receipt.data)
