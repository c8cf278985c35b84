"""Noticing that a trainer has signed two ledgers, and keeping the proof of it as a file (protocol.forks).

Happens when two trainers run with one key, when one is started from an old copy of its directory, or when a trainer
rewrites what was. Whoever sees it says so loudly and goes on from what it holds. Heads of one length are compared as
they come; those of different lengths where the entries between are known (node.ledger.keeper).
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node.ledger.log import LedgerLog
from node.status import StatusBoard
from protocol.atomic import write_atomically
from protocol.envelope import Signed, open_envelope
from protocol.errors import DataDirError, ProtocolError
from protocol.forks import Fork, make_proof, open_proof
from protocol.records import Head, Manifest

log = logging.getLogger(__name__)

DIRECTORY: Final = "forks"
HEAD_FILE: Final = "head"
MAX_PROOFS: Final = 16
"""A trainer that goes on forking fills no disk."""
MAX_HEADS: Final = 1024
"""One for each of the newest lengths."""


def keep_head(path: Path, head: bytes) -> None:
    """Keep the newest head of the ledger that lies beside it. Never raises: the ledger matters more."""
    try:
        write_atomically(path, head, sync=False)
    except (OSError, DataDirError) as error:
        log.warning("head file=%s cannot be written: %s", path, error)


class ForkWitness:
    """What one node has seen of its trainer's heads. Safe for any thread."""

    def __init__(
        self,
        manifest: Signed[Manifest],
        directory: Path,
        *,
        board: StatusBoard | None = None,
        keep_head: Path | None = None,
    ) -> None:
        """Proofs go to `directory`; the newest head that the node's ledger agrees with to `keep_head`."""
        self._lock = threading.RLock()
        self._manifest = manifest
        self._directory = directory
        self._board = board
        self._keep_head = keep_head
        self._heads: OrderedDict[int, Signed[Head]] = OrderedDict()
        self.held = self._recall()
        """The newest head that this node's ledger agrees with."""
        self.fork: Fork | None = None
        """The first one that was proved."""
        self.warning = ""
        """What to tell people of it."""

    def hold(self, head: Signed[Head]) -> None:
        """The ledger here agrees with this head."""
        with self._lock:
            is_news = self.held is None or head.record.ledger_length != self.held.record.ledger_length
            self.held = head
            if is_news and self._keep_head is not None:
                keep_head(self._keep_head, head.data)

    def see(self, head: Signed[Head]) -> Fork | None:
        """Compare with the head of the same length, if one was seen. Never raises."""
        with self._lock:
            seen = self._heads.setdefault(head.record.ledger_length, head)
            self._heads.move_to_end(head.record.ledger_length)
            while len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
            return self.testify(seen, head) if seen.record.ledger_tip != head.record.ledger_tip else None

    def compare(self, head: Signed[Head], ledger: LedgerLog) -> bool:
        """Testify if a head that is no longer than the held one has another tip than the ledger there."""
        start, held = head.record.ledger_length, self.held
        if held is None or held.record.ledger_length < start or held.record.ledger_length > ledger.state.length:
            return False
        between = ledger.ids(start, held.record.ledger_length)
        return self.testify(head, held, base=ledger.state.tip_at(start), between=between) is not None

    def testify(
        self, one: Signed[Head], other: Signed[Head], *, base: bytes | None = None, between: Sequence[bytes] = ()
    ) -> Fork | None:
        """Write the proof that two heads contradict each other; None if they do not. Arguments as `make_proof`'s."""
        try:
            data = make_proof(self._manifest, one, other, base=base, between=between)
        except ProtocolError as error:
            log.debug("no fork: %s", error.message)
            return None
        with self._lock:
            fork, path = open_proof(data), self._keep(data)
            if self.fork is None:
                self._say(fork, path)
                self.fork = fork
        return fork

    def _keep(self, data: bytes) -> Path | None:
        path = self._directory / f"fork-{hashlib.sha256(data).hexdigest()[:16]}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if len(list(self._directory.iterdir())) >= MAX_PROOFS:
                return None
            write_atomically(path, data)
        except (OSError, DataDirError) as error:
            log.error("fork proof=%s cannot be written: %s", path, error)
            return None
        return path

    def _say(self, fork: Fork, path: Path | None) -> None:
        shorter, longer = fork.shorter.record, fork.longer.record
        what = (
            f"the trainer {fork.trainer.short} has signed two ledgers: heads {shorter.sequence} and {longer.sequence},"
            f" of {shorter.ledger_length} and {longer.ledger_length} entries, contradict each other"
        )
        log.error("FORK %s; this node keeps the ledger that it has. proof=%s", what, path)
        self.warning = f"{what}; next: intellect-node audit --fork {path}"
        if self._board is not None:
            self._board.details(fork=self.warning)

    def _recall(self) -> Signed[Head] | None:
        if self._keep_head is None:
            return None
        try:
            head = open_envelope(self._keep_head.read_bytes(), Head).require_author(self._manifest.record.trainer_id)
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            log.warning("the head in %s cannot be used: %s", self._keep_head, error)
            return None
        return head if head.record.run_id == self._manifest.id else None
