"""Admissions, appeals and their answers on their way into the ledger; what follows is node.trainer.consequences'.

The ledger's rules decide; what they refuse is logged and forgotten, because relays said so already to whom it is about.
A petition may come before what it rests on, from another relay: answers wait for their appeal, those of one validator
in nobody else's place.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import trio

from node.ledger.log import LedgerLog
from node.trainer.consequences import Consequences
from protocol.envelope import Signed
from protocol.errors import LedgerError, ProtocolError
from protocol.identity import PeerId
from protocol.records import Admission, Verdict

log = logging.getLogger(__name__)

MAX_WAITING_EACH: Final = 256
"""Answers of one validator whose appeal has not come yet; beyond so many, its oldest go."""


class Petitions:
    """Writes to the ledger; `take` each one as it comes."""

    def __init__(self, ledger: LedgerLog, consequences: Consequences) -> None:
        self._ledger = ledger
        self._consequences = consequences
        self._waiting: dict[PeerId, dict[bytes, Signed[Verdict]]] = {}
        """By validator and id, the oldest first."""

    async def take(self, entry: Signed[Any]) -> list[Signed[Verdict]]:
        """An admission, an appeal, or a verdict that answers one. Gives the answers that were entered."""
        if isinstance(entry.record, Admission):
            await self._admit(entry)
            return []
        if isinstance(entry.record, Verdict):
            return self._answered(entry)
        if entry.id in self._ledger.state.appeals or not self._entered(entry):
            return []
        log.info("appeal contributor=%s submission=%s", entry.author.short, entry.record.submission.hex()[:12])
        return self._enter(self._waited_for(entry.id))

    def _answered(self, answer: Signed[Verdict]) -> list[Signed[Verdict]]:
        state = self._ledger.state
        if answer.record.appeal in state.appeals:
            return self._enter([answer])
        if answer.author in state.manifest.validator_ids:
            own = self._waiting.setdefault(answer.author, {})
            own[answer.id] = answer
            if len(own) > MAX_WAITING_EACH:
                del own[next(iter(own))]
        return []

    def _waited_for(self, appeal: bytes) -> list[Signed[Verdict]]:
        """Take out the answers to an appeal that has come."""
        return [
            own.pop(key)
            for own in self._waiting.values()
            for key, answer in list(own.items())
            if answer.record.appeal == appeal
        ]

    async def _admit(self, entry: Signed[Admission]) -> None:
        state = self._ledger.state
        if state.admitted(entry.author):
            return
        try:
            state.check_admission(entry, work=False)
            await trio.to_thread.run_sync(state.check_admission, entry)
        except ProtocolError as error:
            log.info("no admission contributor=%s %s", entry.author.short, error.message)
            return
        if not state.admitted(entry.author) and self._entered(entry):
            log.info("admitted contributor=%s", entry.author.short)

    def _enter(self, answers: list[Signed[Verdict]]) -> list[Signed[Verdict]]:
        """Enter answers to an appeal that is in the ledger, while it is open, and what follows from them."""
        entered: list[Signed[Verdict]] = []
        for answer in answers:
            case = self._ledger.state.appeals[answer.record.appeal]
            if case.state == "open" and self._entered(answer):
                log.info("appeal answered contributor=%s outcome=%s", case.author.short, answer.record.outcome)
                entered.append(answer)
        self._consequences.write()
        return entered

    def _entered(self, entry: Signed[Any]) -> bool:
        try:
            self._ledger.append([entry.data])
        except LedgerError as error:
            log.info("petition refused rule=%s %s", error.rule, error.message)
            return False
        return True
