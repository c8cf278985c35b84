"""The ledger as it lies on the nodes' disks once they have ended, in plain values that oracles and figures use.

Replayed and read through node.ledger alone. Batches are those that the trainer signed, whether or not the rules take
them: a replay leaves out what breaks a rule. What relays promised (their receipts) is beside it, since what was lost
before it came to the ledger cannot be in it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from node.ledger.audit import Audit
from node.ledger.inspect import replayed
from node.ledger.material import Material, find_material, has_ledger
from node.ledger.rows import leaderboard, submissions_of
from node.ledger.segments import read_segments
from protocol.envelope import id_of
from protocol.errors import NodeError
from protocol.ledger import LedgerState, next_tip
from protocol.records import Batch, Trained
from simnet.oracles.batch_order import (
    PassedOver,
    TrainersEntry,
    due_at_ms,
    passed_over,
    ready_at_ms,
    settled_ms,
    trainers_entries,
)
from simnet.oracles.promises import MAX_PROBLEM_CHARS, Promise, read_promises

log = logging.getLogger(__name__)


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
    """The verdict that settled it; nothing while none has."""
    used_in: int | None = None
    hard: bool = False
    reason: str = ""


class StepSeen(Struct):
    """One batch that the trainer signed: what it holds, and when it was committed to and trained."""

    step: int
    submissions: list[str]
    committed_ms: int
    trained_ms: int | None = None
    ready_ms: int | None = None
    """Since when all that it holds lay there at the latest, as far as the trainer's entries show."""
    due_ms: int | None = None
    """When the last thing was signed that it waited for, by the clock of whoever signed it."""
    entries: int = 0
    """How long the ledger was with the entry that says so of its training."""

    @property
    def idle_ms(self) -> int:
        """For how long at least it could have been made and was not, by the trainer's clock."""
        return 0 if self.ready_ms is None else max(0, self.committed_ms - self.ready_ms)


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
    sources: dict[str, list[str]] = {}
    """Nodes by what of theirs was read to its end beside the ledger: `store`, `outbox`, `docket`."""
    passed_over: list[PassedOver] = []
    notes: list[str] = []
    """What could not be looked at beside it."""

    def active(self, peers: Iterable[str]) -> set[str]:
        """Those of some peers whom the ledger has not put out; also those of whom it knows nothing."""
        return set(peers) - {one.peer_id for one in self.accounts if one.standing != "active"}


def read_books(data_dirs: Mapping[str, Path], *, trainer: str) -> Books:
    """Read the trainer's ledger and hold the other nodes' copies against it; `data_dirs` by the nodes' names.

    Nothing is raised: a report without a ledger is still one.
    """
    try:
        return _read(data_dirs, trainer=trainer)
    except (NodeError, OSError, sqlite3.Error) as error:
        return Books(problem=_said(error))
    except Exception as error:
        log.exception("reading the ledger broke trainer=%s", trainer)
        return Books(problem=f"reading it broke: {type(error).__name__}: {_said(error)}")


def _said(error: Exception) -> str:
    """Without a node's hint: there is nobody who could follow it."""
    return (error.message if isinstance(error, NodeError) else str(error))[:MAX_PROBLEM_CHARS]


def _read(data_dirs: Mapping[str, Path], *, trainer: str) -> Books:
    """The same, and whatever goes wrong with the trainer's own is raised."""
    material = find_material(data_dirs[trainer])
    with replayed(material, say=lambda _: None) as (audit, notes):
        audit.finish(heads=material.heads, checkpoints=material.checkpoints())
        books = _books_of(audit)
        entries = trainers_entries(material, books.notes)
        books.steps = list(_steps(entries, ready_at_ms(audit.state, entries), due_at_ms(audit.state, entries)))
        books.passed_over = list(passed_over(audit.state, entries))
        books.notes += notes
        books.copies = _copies(data_dirs, audit.state, without=trainer, notes=books.notes)
    promises = read_promises(data_dirs, books.notes, validators=material.manifest.record.validators)
    books.promises, books.sources = promises.found, promises.sources
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
        accounts=[_account(row) for row in leaderboard(state)],
        judges=[Judge(row.peer_id, row.verdicts, row.overruled) for row in audit.validators],
        breaches=[f"{breach.kind}: {breach.what}" for breach in audit.breaches.found],
    )


def _submission(row: Mapping[str, Any], state: LedgerState) -> SubmissionSeen:
    return SubmissionSeen(
        id=row["id"],
        contributor=row["contributor"],
        step=row["step"],
        checkpoint_step=row["checkpoint_step"],
        state=row["state"],
        rollouts=row["rollouts"],
        tokens=row["tokens"],
        made_ms=row["at_ms"],
        judged_ms=settled_ms(state.submissions[bytes.fromhex(row["id"])], quorum=state.manifest.quorum),
        used_in=row["used_in"],
        hard=row["hard"],
        reason=row["reason"],
    )


def _steps(
    entries: Sequence[TrainersEntry], ready_ms: Mapping[int, int], due_ms: Mapping[int, int]
) -> Iterator[StepSeen]:
    """Every batch in the order of the ledger's entries, also one that the rules refuse; a step has two if it was so."""
    trained: dict[int, list[tuple[int, int]]] = {}
    for entry in entries:
        if isinstance(entry.record, Trained):
            trained.setdefault(entry.record.step, []).append((entry.record.issued_at_ms, entry.number + 1))
    for entry in entries:
        batch = entry.record
        if isinstance(batch, Batch):
            times = trained.get(batch.step, [])
            keys = [key.hex() for key in batch.submissions]
            at_ms, length = times.pop(0) if times else (None, 0)
            ready, due = ready_ms.get(batch.step), due_ms.get(batch.step)
            yield StepSeen(batch.step, keys, batch.issued_at_ms, at_ms, ready, due, length)


def _account(row: Mapping[str, Any]) -> Account:
    return Account(row["peer_id"], row["standing"], row["credits"], row["accepted"], dict(row["rejected"]))


def _copies(data_dirs: Mapping[str, Path], state: LedgerState, *, without: str, notes: list[str]) -> list[Copy]:
    copies = []
    for name, directory in data_dirs.items():
        if name == without or not has_ledger(directory):
            continue
        try:
            copies.append(_copy(name, find_material(directory), state))
        except (NodeError, OSError, sqlite3.Error, TypeError, ValueError) as error:  # also of what a store holds
            notes.append(f"the copy of {name} cannot be read: {_said(error)}")
    return copies


def _copy(name: str, material: Material, state: LedgerState) -> Copy:
    """Follow the chain of a copy; whether its tip is one that the trainer's had at that length."""
    tip, length = material.manifest.id, 0
    for segment in read_segments(material.ledger):
        for entry in segment.entries:
            tip, length = next_tip(tip, id_of(entry)), length + 1
    return Copy(name, length, agrees=state.tip_at(length) == tip)
