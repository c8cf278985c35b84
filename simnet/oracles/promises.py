"""What relays promised and validators decided, from all disks that say so: not only from those who might have lost it.

A receipt, in a relay's store or in the outbox of whoever holds it, is a promise. An accept counts once a relay has it:
in a relay's store, in an outbox (which has verdicts from relays), or in a docket as posted to a relay whose receipt is
known: a validator notes as posted also what a relay refuses for good. A node that was killed may be behind in what it
noted, so that a promise may be missed; none is made up. Files are read without changing them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from node.ledger.material import RELAY_STORE
from protocol.envelope import open_envelope
from protocol.errors import MalformedError, ProtocolError
from protocol.identity import PeerId
from protocol.records import Receipt, Submission, Verdict

OUTBOX: Final = Path("outbox.sqlite")
DOCKET: Final = Path("docket.sqlite")
MAX_PROBLEM_CHARS: Final = 300
_FEED: Final = "SELECT kind, envelope, receipt FROM feed WHERE kind IN ('submission', 'verdict')"
_RECEIPTS: Final = "SELECT envelope, receipt FROM submissions WHERE receipt IS NOT NULL"
_VERDICTS: Final = "SELECT envelope FROM verdicts"
_POSTED: Final = "SELECT v.envelope, p.relay FROM verdicts v JOIN posted p ON p.submission = v.submission"


class Promise(Struct):
    """A submission that a relay has given a receipt for."""

    id: str
    contributor: str
    received_ms: int
    step: int = 0
    """That it was made for."""
    checkpoint_step: int = 0
    accepts: int = 0
    """Validators whose verdict, as a relay has or had it, accepts it."""
    dropped: bool = False
    """Whether its author holds the receipt and no relay has the submission, although all their stores can be read."""


class _Found:
    """What was read so far."""

    def __init__(self, validators: Iterable[bytes]) -> None:
        self.validators = set(validators)
        self.promises: dict[str, Promise] = {}
        self.accepts: dict[str, set[PeerId]] = {}
        self.held: set[str] = set()
        self._givers: set[tuple[str, PeerId]] = set()
        """Submissions, and relays that gave a receipt for them."""

    def receipt(self, envelope: object, receipt: object) -> str:
        """Take in a receipt that is for the submission beside it; the submission's id. Raises ProtocolError.

        What nodes hold of others' they checked when it came: signatures are not checked again.
        """
        submission = open_envelope(_bytes(envelope), Submission, signature_checked=True)
        given = open_envelope(_bytes(receipt), Receipt, signature_checked=True)
        key, at_ms = submission.id.hex(), given.record.received_at_ms
        self._givers.add((given.record.submission.hex(), given.author))
        if given.record.submission == submission.id:
            record = submission.record
            promise = Promise(key, str(submission.author), at_ms, record.step, record.checkpoint_step)
            known = self.promises.setdefault(key, promise)
            known.received_ms = min(known.received_ms, at_ms)
        return key

    def verdict(self, envelope: object, *, posted_to: PeerId | None = None) -> None:
        """Take in a verdict that a relay has, or that was posted to one. Raises ProtocolError."""
        verdict = open_envelope(_bytes(envelope), Verdict, signature_checked=True)
        if posted_to is not None and (verdict.record.submission.hex(), posted_to) not in self._givers:
            return
        if verdict.record.outcome == "accept" and verdict.author.public_key in self.validators:
            self.accepts.setdefault(verdict.record.submission.hex(), set()).add(verdict.author)


class Promises(Struct):
    """What all disks tell of together, and whose could be read to the end."""

    found: list[Promise]
    sources: dict[str, list[str]]
    """Nodes by what was read of them: `store`, `outbox` and `docket`."""


def read_promises(data_dirs: Mapping[str, Path], notes: list[str], *, validators: Iterable[bytes]) -> Promises:
    """All promises that any disk tells of, with the first receipt's time; `notes` gets what could not be read.

    `validators`: the public keys whose verdicts count.
    """
    found = _Found(validators)
    stores = _read_all(data_dirs, RELAY_STORE, _read_store, found, notes)
    outboxes = _read_all(data_dirs, OUTBOX, _read_outbox, found, notes)
    dockets = _read_all(data_dirs, DOCKET, _read_docket, found, notes)  # last: what was posted counts by the receipts
    every = [name for name, directory in data_dirs.items() if (directory / RELAY_STORE).exists()]
    for key, promise in found.promises.items():
        promise.accepts = len(found.accepts.get(key, ()))
        promise.dropped = bool(stores) and stores == every and key not in found.held
    return Promises(list(found.promises.values()), {"store": stores, "outbox": outboxes, "docket": dockets})


def _read_all(
    data_dirs: Mapping[str, Path], place: Path, read: Callable[[Path, _Found], None], found: _Found, notes: list[str]
) -> list[str]:
    """Read one kind of file wherever it lies; the nodes of which it could be read to its end."""
    whole = []
    for name, directory in data_dirs.items():
        path = directory / place
        if not path.exists():
            continue
        try:
            read(path, found)
        except (sqlite3.Error, ProtocolError, OSError) as error:
            what = {RELAY_STORE: "store", OUTBOX: "outbox", DOCKET: "docket"}[place]
            notes.append(f"the {what} of {name} cannot be read: {str(error)[:MAX_PROBLEM_CHARS]}")
        else:
            whole.append(name)
    return whole


def _read_store(path: Path, found: _Found) -> None:
    for kind, envelope, receipt in _rows(path, _FEED):
        if kind == "verdict":
            found.verdict(envelope)
        else:
            found.held.add(found.receipt(envelope, receipt))


def _read_outbox(path: Path, found: _Found) -> None:
    for envelope, receipt in _rows(path, _RECEIPTS):
        found.receipt(envelope, receipt)
    for (envelope,) in _rows(path, _VERDICTS):
        found.verdict(envelope)


def _read_docket(path: Path, found: _Found) -> None:
    for envelope, relay in _rows(path, _POSTED):
        found.verdict(envelope, posted_to=PeerId(_bytes(relay)))


def _bytes(value: object) -> bytes:
    """A column as every node writes it. Raises MalformedError: another type is no node's, and may be very large."""
    if isinstance(value, bytes):
        return value
    raise MalformedError(f"a row holds {type(value).__name__} where a node writes bytes")


def _rows(path: Path, query: str) -> Iterator[Sequence[Any]]:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        yield from database.execute(query)
