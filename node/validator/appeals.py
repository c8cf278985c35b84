"""Appeals that a validator answers: those in the ledger, about submissions on which it has not decided there.

Among the validators that may, an order drawn by the appeal says who answers: as many as must agree yet. The next one
does when answers contradict each other, or when too few came for some heads. The submission is the one that this
validator saw in the feed; its file is asked of every relay.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from node.validator.bench import REPLACE_HEADS
from node.validator.cases import Case
from node.validator.docket import Docket
from node.validator.draws import Draws
from protocol.draw import judges
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Draw


class AppealCases:
    """Open appeals that are this validator's to answer, each a case that is checked in full."""

    def __init__(self, own: PeerId, ledger: LedgerState, docket: Docket, draws: Draws) -> None:
        self._own = own
        self._ledger = ledger
        self._docket = docket
        self._draws = draws
        self._cases: dict[bytes, Case] = {}
        self._seen: dict[bytes, int] = {}
        """By open appeal: the newest head when it was first seen."""

    def startable(self, relays: Iterable[PeerId]) -> Iterator[Case]:
        """Cases to work on now, each counted as busy when it is given out."""
        is_open = self._ledger.open_appeals()
        self._seen = {appeal: self._seen.get(appeal, self._draws.newest_sequence) for appeal in is_open}
        self._cases = {appeal: case for appeal, case in self._cases.items() if appeal in self._seen or case.busy}
        for appeal in is_open:
            case = self._cases.get(appeal) or self._called(appeal, relays)
            if case is not None and not case.busy and case.due <= time.monotonic():
                case.busy = True
                yield case

    def closed(self, case: Case) -> None:
        self._cases.pop(case.appeal, None)

    def _called(self, appeal: bytes, relays: Iterable[PeerId]) -> Case | None:
        key = self._ledger.appeals[appeal].record.submission
        if self._docket.judged(appeal) or not self._is_mine(appeal, key):
            return None
        opened = self._docket.seen(key)
        if opened is None:
            return None
        draw = Draw(drawn=True, rate=1.0, why="appeal", beacon=b"", receipt=opened.receipt.data)
        case = Case(replace(opened, relays=tuple(relays)), time.monotonic(), deque(relays), draw=draw, appeal=appeal)
        self._cases[appeal] = case
        return case

    def _is_mine(self, appeal: bytes, submission: bytes) -> bool:
        one = self._ledger.submissions[submission]
        answered = {peer for peer, said in list(one.verdicts.items()) if said.record.appeal == appeal}
        free = [peer for peer in self._ledger.manifest.validator_ids if peer not in one.decided() | answered]
        if self._own not in free:
            return False
        called = self._ledger.appeal_tally(appeal).missing
        absent = self._draws.heads_since(self._seen[appeal]) // REPLACE_HEADS
        return judges(appeal, submission, free).index(self._own) < called + absent
