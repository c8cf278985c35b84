"""The ledger as it lies on the nodes' disks once they have ended, in plain values that oracles and figures use.

Replayed and read through node.ledger alone. What relays promised (their receipts) is beside it, since what was lost
before it came to the ledger cannot be in it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from node.ledger.audit import Audit
from node.ledger.inspect import replayed
from node.ledger.material import RELAY_STORE, Material, find_material, has_ledger
from node.ledger.rows import leaderboard, submissions_of
from node.ledger.segments import read_segments
from protocol.envelope import id_of, open_envelope
from protocol.errors import NodeError, ProtocolError
from protocol.identity import PeerId
from protocol.ledger import LedgerState, next_tip
from protocol.records import Receipt, Verdict

MAX_PROBLEM_CHARS: Final = 300


class SubmissionSeen(Struct):
    """One submission of the ledger, and when it came how far; times are wall-clock milliseconds of who says so."""

    id: str
    contributor: str
    step: int
    checkpoint_step: int
    state: str
    rollouts: int
    tokens: int
    made_ms: int
    """When its contributor signed it."""
    received_ms: int | None = None
    """The first relay's receipt."""
    judged_ms: int | None = None
    """The verdict that settled it."""
    used_in: int | None = None
    hard: bool = False
    reason: str = ""


class StepSeen(Struct):
    """One step of the ledger: what its batch holds, and when it was committed to and trained."""

    step: int
    submissions: list[str]
    committed_ms: int
    trained_ms: int | None = None


class Account(Struct):
    """What the replay makes of one contributor."""

    peer_id: str
    standing: str
    credits: int
    accepted: int
    rejected: dict[str, int] = {}


class Judge(Struct):
    """One validator's votes in the ledger, and how many of them said the opposite of what was settled."""

    peer_id: str
    verdicts: int
    overruled: int


class Copy(Struct):
    """A node's own copy of the ledger; `agrees` when it is the beginning of the trainer's."""

    node: str
    entries: int
    agrees: bool


class Promise(Struct):
    """A submission that a relay has given a receipt for."""

    id: str
    contributor: str
    received_ms: int
    accepts: int = 0
    """Validators whose verdict at any relay accepts it."""


class Books(Struct):
    """A run's ledger. `problem` says why it could not be read; then all else is empty."""

    problem: str = ""
    max_staleness: int = 0
    total_steps: int = 0
    quorum: int = 1
    entries: int = 0
    submissions: list[SubmissionSeen] = []
    steps: list[StepSeen] = []
    accounts: list[Account] = []
    judges: list[Judge] = []
    breaches: list[str] = []
    """What the audit finds, in words."""
    copies: list[Copy] = []
    promises: list[Promise] = []
    notes: list[str] = []
    """What could not be looked at beside it."""


def read_books(data_dirs: Mapping[str, Path], *, trainer: str) -> Books:
    """Read the trainer's ledger and hold the other nodes' copies against it; `data_dirs` by the nodes' names."""
    try:
        material = find_material(data_dirs[trainer])
        with replayed(material, say=lambda _: None) as (audit, notes):
            audit.finish(heads=material.heads, checkpoints=material.checkpoints())
            books = _books_of(audit)
            books.notes += notes
            books.copies = _copies(data_dirs, audit.state, without=trainer, notes=books.notes)
    except (NodeError, OSError, sqlite3.Error) as error:
        return Books(problem=str(error)[:MAX_PROBLEM_CHARS])
    books.promises = list(_promises(data_dirs, books.notes).values())
    received = {promise.id: promise.received_ms for promise in books.promises}
    for one in books.submissions:
        one.received_ms = received.get(one.id)
    return books


def _books_of(audit: Audit) -> Books:
    state = audit.state
    spec = state.manifest.batch
    return Books(
        max_staleness=spec.max_staleness,
        total_steps=spec.total_steps,
        quorum=state.manifest.quorum,
        entries=state.length,
        submissions=[_submission(row, state) for row in submissions_of(state)],
        steps=[_step(step, state) for step in sorted(state.batches)],
        accounts=[_account(row) for row in leaderboard(state)],
        judges=[Judge(row.peer_id, row.verdicts, row.overruled) for row in audit.validators],
        breaches=[f"{breach.kind}: {breach.what}" for breach in audit.breaches.found],
    )


def _submission(row: Mapping[str, Any], state: LedgerState) -> SubmissionSeen:
    verdicts = sorted(
        signed.record.issued_at_ms for signed in state.submissions[bytes.fromhex(row["id"])].verdicts.values()
    )
    quorum = state.manifest.quorum
    return SubmissionSeen(
        id=row["id"],
        contributor=row["contributor"],
        step=row["step"],
        checkpoint_step=row["checkpoint_step"],
        state=row["state"],
        rollouts=row["rollouts"],
        tokens=row["tokens"],
        made_ms=row["at_ms"],
        judged_ms=verdicts[quorum - 1] if len(verdicts) >= quorum else None,
        used_in=row["used_in"],
        hard=row["hard"],
        reason=row["reason"],
    )


def _step(step: int, state: LedgerState) -> StepSeen:
    trained = state.trained.get(step)
    return StepSeen(
        step=step,
        submissions=[key.hex() for key in state.batches[step]],
        committed_ms=state.committed[step].issued_at_ms,
        trained_ms=trained.issued_at_ms if trained else None,
    )


def _account(row: Mapping[str, Any]) -> Account:
    return Account(row["peer_id"], row["standing"], row["credits"], row["accepted"], dict(row["rejected"]))


def _copies(data_dirs: Mapping[str, Path], state: LedgerState, *, without: str, notes: list[str]) -> list[Copy]:
    copies = []
    for name, directory in data_dirs.items():
        if name == without or not has_ledger(directory):
            continue
        try:
            copies.append(_copy(name, find_material(directory), state))
        except (NodeError, OSError) as error:
            notes.append(f"the copy of {name} cannot be read: {str(error)[:MAX_PROBLEM_CHARS]}")
    return copies


def _copy(name: str, material: Material, state: LedgerState) -> Copy:
    """Follow the chain of a copy; whether its tip is one that the trainer's had at that length."""
    tip, length = material.manifest.id, 0
    for segment in read_segments(material.ledger):
        for entry in segment.entries:
            tip, length = next_tip(tip, id_of(entry)), length + 1
    return Copy(name, length, agrees=state.tip_at(length) == tip)


def _promises(data_dirs: Mapping[str, Path], notes: list[str]) -> dict[str, Promise]:
    """What all relays together have given receipts for, with the first receipt's time."""
    promises: dict[str, Promise] = {}
    accepts: dict[str, set[PeerId]] = {}
    for name, directory in data_dirs.items():
        path = directory / RELAY_STORE
        if not path.is_file():
            continue
        try:
            for row in _feed(path):
                _take_row(row, promises, accepts)
        except (sqlite3.Error, ProtocolError) as error:
            notes.append(f"the store of {name} cannot be read: {str(error)[:MAX_PROBLEM_CHARS]}")
    for key, voters in accepts.items():
        if key in promises:
            promises[key].accepts = len(voters)
    return promises


def _feed(path: Path) -> Iterator[Sequence[Any]]:
    query = "SELECT kind, id, author, envelope, receipt FROM feed WHERE kind IN ('submission', 'verdict')"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        yield from database.execute(query)


def _take_row(row: Sequence[Any], promises: dict[str, Promise], accepts: dict[str, set[PeerId]]) -> None:
    kind, key, author, envelope, receipt = row
    if kind == "verdict":
        verdict = open_envelope(bytes(envelope), Verdict, signature_checked=True)
        if verdict.record.outcome == "accept":
            accepts.setdefault(verdict.record.submission.hex(), set()).add(verdict.author)
        return
    received_ms = open_envelope(bytes(receipt), Receipt, signature_checked=True).record.received_at_ms
    known = promises.setdefault(bytes(key).hex(), Promise(bytes(key).hex(), str(PeerId(bytes(author))), received_ms))
    known.received_ms = min(known.received_ms, received_ms)
