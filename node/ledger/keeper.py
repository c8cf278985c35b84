"""A copy of the ledger that keeps up with heads: fetches what is missing, takes in what leads to the signed tip.

Where it does not, either who was asked lies or the trainer has signed two ledgers; the entries from further back tell
which. Either way the copy stays as it is. Used by relays (from the trainer's origin) and by followers (from relays).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from node.ledger.log import LedgerLog
from node.ledger.pull import LedgerSource, pull
from node.ledger.spool import Spool
from node.ledger.witness import ForkWitness
from protocol.envelope import Signed, id_of
from protocol.errors import LedgerError, ProtocolError
from protocol.forks import MAX_BETWEEN
from protocol.ledger import next_tip
from protocol.records import Head

log = logging.getLogger(__name__)

FORK: Final = "fork"
STEPS_BACK: Final = (1000, MAX_BETWEEN)
"""Entries before the copy's end where the point of a fork is looked for."""


class LedgerKeeper:
    """One task calls `catch_up`; the state may be read meanwhile."""

    def __init__(self, ledger: LedgerLog, witness: ForkWitness | None = None) -> None:
        """Without a `witness` a contradiction is an error like others, and no proof is written."""
        self.ledger = ledger
        self._witness = witness

    async def catch_up(self, source: LedgerSource, head: Signed[Head]) -> None:
        """Be as long as a head says.

        Raises LedgerError `fork` where the head contradicts what is here, RelayError or ProtocolError where the source
        does not have it or lies, DataDirError when the disk fails: the next call writes what it refused. The copy is
        otherwise as it was.
        """
        await trio.to_thread.run_sync(self.ledger.flush)
        if self.ledger.state.length < head.record.ledger_length:
            await self._fetch(source, head)
        if self.ledger.state.tip_at(head.record.ledger_length) != head.record.ledger_tip:
            await self._contradiction(source, head)
        if self._witness is not None:
            self._witness.hold(head)

    async def _fetch(self, source: LedgerSource, head: Signed[Head]) -> None:
        length = head.record.ledger_length
        with self._spool(self.ledger.state.length) as spool:
            await self._pull(source, spool, length)
            if spool.tip == head.record.ledger_tip:
                await trio.to_thread.run_sync(lambda: self.ledger.extend(spool, length=length, tip=spool.tip))
                return
        await self._look_back(source, head)

    async def _pull(self, source: LedgerSource, spool: Spool, length: int) -> None:
        held = [one for one in self.ledger.segments() if one.end <= spool.length]
        await pull(source, spool, length=length, held=held, run_id=self.ledger.state.run_id)

    async def _contradiction(self, source: LedgerSource, head: Signed[Head]) -> None:
        """A head of a length that the copy has, with another tip."""
        if self._witness is not None and not self._witness.compare(head, self.ledger):
            await self._look_back(source, head)
        raise _fork(head, self.ledger.state.length)

    async def _look_back(self, source: LedgerSource, head: Signed[Head]) -> None:
        """The source's entries do not continue the copy. If they lead to the head from further back, it is a fork."""
        held = self._witness.held if self._witness is not None else None
        state = self.ledger.state
        for back in STEPS_BACK if held is not None else ():
            start = max(0, state.length - back)
            with self._spool(start) as spool:
                await self._pull(source, spool, head.record.ledger_length)
                if spool.tip == head.record.ledger_tip:
                    self._testify(spool, head)
                    raise _fork(head, state.length)
        raise ProtocolError(f"the ledger entries of {source.name} do not lead to the tip that the trainer signed")

    def _testify(self, spool: Spool, head: Signed[Head]) -> None:
        if self._witness is None or self._witness.held is None:
            return
        held = self._witness.held
        base, between = _beyond(spool, held.record.ledger_length, self.ledger.state.tip_at(spool.start) or b"")
        self._witness.testify(held, head, base=base, between=between)

    @contextmanager
    def _spool(self, start: int) -> Iterator[Spool]:
        tip = self.ledger.state.tip_at(start)
        with Spool(self.ledger.path, length=start, tip=tip or self.ledger.state.run_id) as spool:
            yield spool


def _beyond(spool: Spool, length: int, tip: bytes) -> tuple[bytes, list[bytes]]:
    """The tip that a spool's ledger has at a length, and the ids of its entries from there on."""
    ids: list[bytes] = []
    for number, entry in enumerate(spool, spool.start):
        if number < length:
            tip = next_tip(tip, id_of(entry))
        else:
            ids.append(id_of(entry))
    return tip, ids


def _fork(head: Signed[Head], length: int) -> LedgerError:
    return LedgerError(
        f"head {head.record.sequence}, of {head.record.ledger_length} entries, contradicts the {length} ledger entries"
        " here, which the trainer signed before",
        rule=FORK,
    )
