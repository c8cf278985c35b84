"""The entries that verdicts make due: evictions, and reinstatements after a granted appeal.

What is owed is the ledger's to say, and nothing is remembered here: whatever a crash kept a trainer from writing, the
next start finds owed and writes.
"""

from __future__ import annotations

import logging

from node.clock import now_ms
from node.ledger.log import LedgerLog
from protocol.duties import Duty
from protocol.envelope import seal
from protocol.errors import LedgerError
from protocol.identity import Identity
from protocol.records import Eviction, Reinstatement

log = logging.getLogger(__name__)


class Consequences:
    """`write` after each entry that may ask for one, and at the start."""

    def __init__(self, identity: Identity, ledger: LedgerLog) -> None:
        self._identity = identity
        self._ledger = ledger

    def write(self) -> None:
        """Enter what the trainer owes by its ledger."""
        for duty in self._ledger.state.owed():
            entry = self._eviction(duty) if duty.kind == "eviction" else self._reinstatement(duty)
            try:
                self._ledger.append([seal(entry, self._identity)])
            except LedgerError as error:
                log.warning("no %s contributor=%s rule=%s", duty.kind, duty.contributor.short, error.rule)
                continue
            log.warning("%s contributor=%s reason=%r", duty.kind, duty.contributor.short, entry.reason)

    def _eviction(self, duty: Duty) -> Eviction:
        state = self._ledger.state
        verdicts = state.submissions[duty.submission].verdicts.values()
        reason = next((one.record.reason for one in verdicts if one.id == duty.verdict), "")
        return Eviction(
            run_id=state.run_id,
            contributor=duty.contributor.public_key,
            verdict=duty.verdict,
            reason=reason[:1000],
            issued_at_ms=now_ms(),
        )

    def _reinstatement(self, duty: Duty) -> Reinstatement:
        return Reinstatement(
            run_id=self._ledger.state.run_id,
            contributor=duty.contributor.public_key,
            appeal=duty.appeal,
            verdict=duty.verdict,
            reason="validators that had not judged it accept what this contributor was evicted for",
            issued_at_ms=now_ms(),
        )
