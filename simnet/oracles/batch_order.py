"""What lay there when each batch was made: whether it holds what came first, and since when that was all there.

A trainer takes what is usable in the ledger's order (node.trainer.gather): a batch is a beginning of that. Worked out
from a replay's state, which says what may not be trained at all: evicted authors, appeals, policies of another lineage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from node.ledger.material import Material
from node.ledger.segments import read_segments
from protocol.errors import NodeError, ProtocolError
from protocol.identity import PeerId
from protocol.ledger import LedgerState, LedgerSubmission, open_entry
from protocol.records import Batch, Eviction, Reinstatement, Trained
from simnet.oracles.promises import MAX_PROBLEM_CHARS

TrainersRecord = Batch | Trained | Eviction | Reinstatement
_NEVER: Final = 1 << 60


class PassedOver(Struct):
    """An accepted submission that a batch could have held, and that it left out for one that came later."""

    step: int
    id: str
    instead: str


@dataclass(frozen=True)
class TrainersEntry:
    """What the trainer signed of its own, and the number of its entry."""

    number: int
    record: TrainersRecord


@dataclass(frozen=True)
class _Work:
    """An accepted submission, and the number of the entry from which on it was that."""

    key: bytes
    author: PeerId
    place: int
    policy: int
    checkpoint: bytes
    settled: int


def trainers_entries(material: Material, notes: list[str]) -> list[TrainersEntry]:
    """The trainer's own entries in order, also those that the rules refuse; `notes` gets why there are no more."""
    found: list[TrainersEntry] = []
    number, trainer = -1, material.manifest.record.trainer_id
    try:
        for segment in read_segments(material.ledger):
            for data in segment.entries:
                number += 1
                with suppress(ProtocolError):  # which the audit has found
                    entry = open_entry(data, signature_checked=True)  # the audit checks it
                    if entry.author == trainer and isinstance(entry.record, TrainersRecord):
                        found.append(TrainersEntry(number, entry.record))
    except NodeError as error:
        notes.append(f"batches cannot be read to the end: {str(error)[:MAX_PROBLEM_CHARS]}")
    return found


def passed_over(state: LedgerState, entries: Iterable[TrainersEntry]) -> Iterator[PassedOver]:
    """What each batch left out for later work. `state` is that of the whole ledger."""
    shelf = _Shelf(state)
    for entry in entries:
        shelf.fill(entry.number)
        match entry.record:
            case Eviction():
                shelf.out.add(PeerId(entry.record.contributor))
            case Reinstatement():
                shelf.out.discard(PeerId(entry.record.contributor))
            case Trained():
                shelf.gave.setdefault(entry.record.step + 1, entry.record.checkpoint)
            case Batch() if state.committed.get(entry.record.step) == entry.record:
                yield from shelf.left_out(entry.record)
                shelf.take(entry.record)


class _Shelf:
    """Accepted work that is in no batch yet, as the ledger grows."""

    def __init__(self, state: LedgerState) -> None:
        self._staleness = state.manifest.batch.max_staleness
        self._to_come = sorted(_accepted(state), key=lambda one: one.settled, reverse=True)
        self._there: dict[bytes, _Work] = {}
        self.out: set[PeerId] = set()
        """Contributors that are evicted."""
        self.gave: dict[int, bytes] = {}
        """The checkpoint of each step's policy, as far as the ledger names it."""

    def fill(self, length: int) -> None:
        """Put on it what was accepted in the first so many entries."""
        while self._to_come and self._to_come[-1].settled < length:
            one = self._to_come.pop()
            self._there[one.key] = one

    def left_out(self, batch: Batch) -> Iterator[PassedOver]:
        held = [self._there[key] for key in batch.submissions if key in self._there]
        last = max(held, key=lambda one: one.place, default=None)
        names = set(batch.submissions)
        for one in self._there.values():
            if last and one.place < last.place and one.key not in names and self._is_usable(one, batch.step):
                yield PassedOver(batch.step, one.key.hex(), last.key.hex())

    def take(self, batch: Batch) -> None:
        oldest, names = batch.step + 1 - self._staleness, set(batch.submissions)
        self._there = {
            key: one for key, one in self._there.items() if key not in names and one.policy >= oldest
        }  # fmt: skip

    def _is_usable(self, one: _Work, step: int) -> bool:
        fresh = step - self._staleness <= one.policy <= step
        return fresh and one.author not in self.out and self.gave.get(one.policy, one.checkpoint) == one.checkpoint


def _accepted(state: LedgerState) -> Iterator[_Work]:
    for key, one in state.submissions.items():
        if one.state == "accepted" and one.settled_at is not None and not one.appeal:
            record = one.record
            yield _Work(key, one.author, one.place, record.checkpoint_step, record.checkpoint, one.settled_at - 1)


def ready_at_ms(state: LedgerState, entries: Sequence[TrainersEntry]) -> dict[int, int]:
    """By step: since when, at the latest and by the trainer's clock, all that its batch holds lay there to be taken.

    That is the time of the trainer's first entry that is not before the last thing that was waited for: an accept, the
    batch before, a policy that is new enough. A step that ended by its deadline, or without such an entry before its
    batch, is left out.
    """
    found: dict[int, int] = {}
    batches = {one.record.step: one.number for one in entries if isinstance(one.record, Batch)}
    trained = {one.record.step: one.number for one in entries if isinstance(one.record, Trained)}
    returns = {
        PeerId(one.record.contributor): one.number for one in entries if isinstance(one.record, Reinstatement)
    }  # fmt: skip
    for place, entry in enumerate(entries):
        batch = entry.record
        if not isinstance(batch, Batch) or batch.ended == "deadline" or state.committed.get(batch.step) != batch:
            continue
        policy = trained.get(batch.step - 1 - state.manifest.batch.max_staleness, -1)
        ready = max(batches.get(batch.step - 1, -1), policy, _settled(state, batch, returns))
        first = place
        while first and entries[first - 1].number >= ready:
            first -= 1
        if first < place:
            found[batch.step] = entries[first].record.issued_at_ms
    return found


def due_at_ms(state: LedgerState, entries: Sequence[TrainersEntry]) -> dict[int, int]:
    """By step: when the last thing was signed that its batch waited for, by the clock of whoever signed it.

    That is a vote that made a quorum, the batch before, a policy that is new enough; and where the step's time was
    over, its deadline. A batch cannot have been made before; how long what was signed was on its way, the ledger does
    not tell. Left out is a batch with work of somebody who came back, and a first step that waited for its deadline.
    """
    returned = {PeerId(one.record.contributor) for one in entries if isinstance(one.record, Reinstatement)}
    found: dict[int, int] = {}
    for entry in entries:
        batch = entry.record
        if isinstance(batch, Batch) and state.committed.get(batch.step) == batch:
            opened_ms = _opened_ms(state, batch)
            held = [state.submissions[key] for key in batch.submissions]
            votes = [settled_ms(one, quorum=state.manifest.quorum) for one in held]
            signed = [at_ms for at_ms in votes if at_ms is not None]
            if opened_ms is not None and len(signed) == len(held) and not any(one.author in returned for one in held):
                found[batch.step] = max([opened_ms, *signed])
    return found


def settled_ms(one: LedgerSubmission, *, quorum: int) -> int | None:
    """When the vote was signed that made a quorum, in the ledger's order; votes to the contrary settle nothing."""
    wanted = {"accepted": "accept", "rejected": "reject"}.get(one.state)
    votes = [said.record.issued_at_ms for said in one.verdicts.values() if said.record.outcome == wanted]
    return votes[quorum - 1] if len(votes) >= quorum else None


def _opened_ms(state: LedgerState, batch: Batch) -> int | None:
    """Since when a batch could be made if all that it holds lay there; None where the ledger does not say it."""
    spec = state.manifest.batch
    policy = state.trained.get(batch.step - 1 - spec.max_staleness)
    opened_ms = max(state.committed_at_ms(batch.step), policy.issued_at_ms if policy else 0)
    if batch.ended != "deadline":
        return opened_ms
    if batch.step == 0 or spec.deadline_s is None:
        return None
    return opened_ms + math.ceil(1000 * spec.deadline_s)


def _settled(state: LedgerState, batch: Batch, returns: Mapping[PeerId, int]) -> int:
    """The number of the entry that made the last of a batch's submissions usable."""
    held = [state.submissions[key] for key in batch.submissions]
    settled = [(one.settled_at or _NEVER) - 1 for one in held]
    return max([*settled, *(returns.get(one.author, -1) for one in held)], default=-1)
