"""Admissions, appeals and their answers on their way into the ledger; what follows is node.trainer.consequences'.

The ledger's rules decide; what they refuse is logged and forgotten, because relays said so already to whom it is about.
A petition may come before what it rests on, from another relay: answers wait for their appeal.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import trio

from node.ledger.log import LedgerLog
from node.trainer.consequences import Consequences
from protocol.envelope import Signed
from protocol.errors import LedgerError, ProtocolError
from protocol.records import Admission, Verdict

log = logging.getLogger(__name__)

MAX_WAITING: Final = 1024
"""Answers whose appeal has not come yet."""


class Petitions:
    """Writes to the ledger; `take` each one as it comes."""

    def __init__(self, ledger: LedgerLog, consequences: Consequences) -> None:
        self._ledger = ledger
        self._consequences = consequences
        self._waiting: dict[bytes, Signed[Verdict]] = {}

    async def take(self, entry: Signed[Any]) -> list[Signed[Verdict]]:
        """An admission, an appeal, or a verdict that answers one. Gives the answers that were entered."""
        if isinstance(entry.record, Admission):
            await self._admit(entry)
            return []
        if isinstance(entry.record, Verdict):
            if len(self._waiting) < MAX_WAITING:
                self._waiting[entry.id] = entry
        elif entry.id not in self._ledger.state.appeals and self._entered(entry):
            log.info("appeal contributor=%s submission=%s", entry.author.short, entry.record.submission.hex()[:12])
        return self._answer()

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

    def _answer(self) -> list[Signed[Verdict]]:
        """Enter the answers whose appeal is open, and what follows from them."""
        entered: list[Signed[Verdict]] = []
        for key, answer in list(self._waiting.items()):
            case = self._ledger.state.appeals.get(answer.record.appeal)
            if case is None:
                continue
            del self._waiting[key]
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
