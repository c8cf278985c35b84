"""The audit of a run: every entry of its ledger held against everything that is known, in one pass and flat memory.

Replays the very rules that nodes replay (protocol.ledger), and beside them keeps books of its own: balances
(node.ledger.books), the lineage of checkpoints, and the tips that the trainer signed in heads that drew. An entry that
is refused is a breach, and the audit goes on after it. What needs files, policies or an engine is node.ledger.recheck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from node.ledger.books import Books
from node.ledger.duties import Duties
from node.ledger.rows import leaderboard, run_row
from node.ledger.signatures import Checked, Fault, fault_kind
from protocol.draw import beacon_of, check_rate, is_drawn
from protocol.envelope import Signed, id_of, open_envelope
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.ledger import LedgerMemory, LedgerState
from protocol.records import Batch, CheckpointManifest, Eviction, Head, Manifest, Reinstatement, Trained, Verdict
from protocol.run import RunAddress

MAX_BREACHES: Final = 1000
"""Shown; all are counted."""
MAX_TEXT_CHARS: Final = 500
_HEADS: Final = 256


class Breach(msgspec.Struct, frozen=True):
    """Something that should not be: at which entry, what kind, by whom, and in words."""

    kind: str
    who: str
    what: str
    entry: int | None = None


class Breaches:
    """All that was found, counted by kind; the first ones in words."""

    def __init__(self) -> None:
        self.found: list[Breach] = []
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, who: PeerId | None, what: str, *, entry: int | None = None) -> None:
        self.counts[kind] += 1
        if len(self.found) < MAX_BREACHES:
            self.found.append(Breach(kind, str(who) if who else "", what[:MAX_TEXT_CHARS], entry))


class ValidatorRow(msgspec.Struct):
    """What one validator said."""

    peer_id: str
    accept: int = 0
    reject: int = 0
    undecided: int = 0
    hard: int = 0
    in_full: int = 0
    """Verdicts with the costly checks made, or due."""


class Report(msgspec.Struct, kw_only=True):
    """What an audit found. `notes` say what could not be looked at."""

    run: dict[str, Any]
    trainer: str
    quorum: int
    entries: dict[str, int]
    contributors: list[dict[str, Any]]
    validators: list[ValidatorRow]
    forfeited: int
    """Credits that evictions took and no reinstatement gave back."""
    appeals: dict[str, int]
    """How many are open, granted, refused."""
    breaches: list[Breach]
    breaches_by_kind: dict[str, int]
    notes: list[str]
    seconds: float = 0.0
    rechecked: list[dict[str, Any]] = []

    @property
    def clean(self) -> bool:
        return not self.breaches_by_kind


class Audit:
    """Give it every entry in order, then `finish`."""

    def __init__(self, manifest: Signed[Manifest], memory: LedgerMemory | None = None) -> None:
        self.manifest = manifest
        self.state = LedgerState(
            manifest.id, manifest.record, operator=manifest.author, memory=memory, signatures_checked=True
        )
        self.state.work_checked = True
        self.breaches = Breaches()
        self._kinds: Counter[str] = Counter()
        self._validators = {peer: ValidatorRow(str(peer)) for peer in manifest.record.validator_ids}
        self._books = Books(self.state, self._complain)
        self._lineage = _Lineage(self.state, self.breaches)
        self._beacons = _Beacons(self.state, self.breaches, self._lineage)
        self._duties = Duties(self.state)
        self._notes: list[str] = []

    def take(self, checked: Checked) -> None:
        """Hold one entry against the rules and the audit's own books. Raises MalformedError where the chain ends."""
        entry, fault, number = checked.entry, checked.fault, checked.number
        if fault is not None:
            self._blame(fault, entry, number)
        if entry is None or (fault is not None and not _costs_nothing(entry, fault)):
            return self.state.pass_over(id_of(checked.data))
        try:
            self.state.take(entry)
        except ProtocolError as error:
            self.breaches.add(fault_kind(error), entry.author, error.message, entry=number)
            return self.state.pass_over(entry.id)
        self._kinds[entry.record.KIND] += 1
        self._note(entry, number)

    def finish(
        self, *, heads: Iterable[Signed[Head]] = (), checkpoints: Iterable[Signed[CheckpointManifest]] = ()
    ) -> None:
        """Compare with signed heads and checkpoints that are at hand, and close the books."""
        heads = tuple(heads)
        for head in heads:
            self._beacons.see(head, None)
        for checkpoint in checkpoints:
            self._lineage.held(checkpoint)
        self._books.close()
        self._close_duties(over=any(self._ends(head) for head in heads))

    def report(self, notes: Sequence[str] = ()) -> Report:
        record = self.manifest.record
        return Report(
            run=run_row(self.state, RunAddress(self.manifest.author, record.name)),
            trainer=str(record.trainer_id),
            quorum=record.quorum,
            entries=dict(self._kinds),
            contributors=leaderboard(self.state),
            validators=list(self._validators.values()),
            forfeited=self._books.forfeited,
            appeals=dict(Counter(case.state for case in self.state.appeals.values())),
            breaches=self.breaches.found,
            breaches_by_kind=dict(self.breaches.counts),
            notes=[*notes, *self._notes],
        )

    def _note(self, entry: Signed[Any], number: int) -> None:
        match entry.record:
            case Verdict():
                self._count(entry)
                self._books.verdict(entry, number)
                self._beacons.verdict(entry, number)
                self._duties.verdict(entry, number)
            case Batch():
                self._lineage.batch(entry.record, number)
            case Trained():
                self._lineage.trained(entry.record, number)
            case Eviction():
                self._books.eviction(entry.record)
                self._duties.eviction(entry.record)
            case Reinstatement():
                self._books.reinstatement(entry.record)

    def _ends(self, head: Signed[Head]) -> bool:
        """Whether the trainer has signed that the run is over with these entries."""
        record = head.record
        return (
            head.author == self.state.manifest.trainer_id and record.finished and (record.ledger_tip == self.state.tip)
        )

    def _close_duties(self, *, over: bool) -> None:
        trainer = self.state.manifest.trainer_id
        for duty in self._duties.left(over=over):
            if duty.overdue:
                self.breaches.add(duty.kind, trainer, duty.what, entry=duty.entry)
            else:
                self._notes.append(f"{duty.kind}: {duty.what} yet, since entry {duty.entry}")

    def _blame(self, fault: Fault, entry: Signed[Any] | None, number: int) -> None:
        """A false signature of an entry is not its author's, who is only named; one within is, for it was signed."""
        if fault.where == "entry" and fault.kind == "signature" and entry is not None:
            what = f"{fault.what}; {entry.author} is named as its author, which this does not show"
            self.breaches.add(fault.kind, None, what, entry=number)
        else:
            self.breaches.add(fault.kind, entry.author if entry else None, fault.what, entry=number)

    def _complain(self, kind: str, who: PeerId | None, what: str, entry: int | None) -> None:
        self.breaches.add(kind, who, what, entry=entry)

    def _count(self, entry: Signed[Verdict]) -> None:
        row = self._validators[entry.author]
        setattr(row, entry.record.outcome, getattr(row, entry.record.outcome) + 1)
        row.hard += entry.record.outcome == "reject" and entry.record.hard
        row.in_full += entry.record.draw.drawn


class _Lineage:
    """Which checkpoint is which step's: by the trainer's entries, by its heads, and by accepted work."""

    def __init__(self, state: LedgerState, breaches: Breaches) -> None:
        self._state = state
        self._breaches = breaches
        self._known: dict[int, bytes] = {}

    def batch(self, batch: Batch, number: int) -> None:
        for key in batch.submissions:
            one = self._state.submissions[key]
            what = f"submission {key.hex()[:12]}, which step {batch.step} trains on, names another policy"
            self.name(one.record.checkpoint_step, one.record.checkpoint, one.author, what, entry=number)

    def trained(self, record: Trained, number: int) -> None:
        what = f"step {record.step} gave checkpoint {record.checkpoint.hex()[:12]}"
        self.name(record.step + 1, record.checkpoint, self._state.manifest.trainer_id, what, entry=number)

    def held(self, checkpoint: Signed[CheckpointManifest]) -> None:
        """A checkpoint's manifest that is at hand."""
        trainer = self._state.manifest.trainer_id
        what = f"the manifest of checkpoint {checkpoint.record.step} at hand is another one"
        if checkpoint.author != trainer:
            self._breaches.add("lineage", checkpoint.author, f"{what}, and not signed by the trainer")
        else:
            self.name(checkpoint.record.step, checkpoint.id, trainer, what)

    def name(self, step: int, checkpoint: bytes, who: PeerId, what: str, *, entry: int | None = None) -> None:
        """Somebody says which checkpoint is a step's."""
        known = self._known.setdefault(step, checkpoint)
        if known != checkpoint:
            self._breaches.add("lineage", who, f"{what}: {checkpoint.hex()[:12]}, not {known.hex()[:12]}", entry=entry)


class _Beacons:
    """Heads that the trainer signed: what they say of the ledger and of checkpoints must be so."""

    def __init__(self, state: LedgerState, breaches: Breaches, lineage: _Lineage) -> None:
        self._state = state
        self._breaches = breaches
        self._lineage = lineage
        self._seen = lru_cache(maxsize=_HEADS)(self._see_once)

    def verdict(self, entry: Signed[Verdict], number: int) -> None:
        """Draws that excuse from the costly checks were proved by the rules; here are those that ask for them."""
        draw = entry.record.draw
        head = self._seen(draw.beacon, number - number % _HEADS) if draw.beacon else None
        if head is None or not draw.drawn:
            return
        contributor = PeerId(entry.record.contributor)
        length = min(head.record.ledger_length, self._state.length)
        rate = check_rate(self._state.record(contributor, length), self._state.manifest.checks)
        if draw.rate != rate or not is_drawn(beacon_of(head), entry.record.submission, rate=rate):
            what = (
                f"drawn at a rate of {draw.rate:.4g}, it says; the ledger gives {rate:.4g}, and its beacon no such draw"
            )
            self._breaches.add("draw", entry.author, what, entry=number)

    def _see_once(self, data: bytes, near: int) -> Signed[Head] | None:
        try:
            head = open_envelope(data, Head, signature_checked=True)
        except ProtocolError:
            return None  # the signatures' check has said so
        self.see(head, near)
        return head

    def see(self, head: Signed[Head], near: int | None) -> None:
        """A head of the run, from about entry `near` or from elsewhere."""
        record, trainer = head.record, self._state.manifest.trainer_id
        if head.author != trainer or record.run_id != self._state.run_id:
            self._breaches.add("evidence", head.author, "a head of another trainer or run", entry=near)
            return
        tip = self._state.tip_at(record.ledger_length)
        if tip is None and near is None:
            what = (
                f"head {record.sequence} speaks of {record.ledger_length} entries; there are {self._state.length}: the "
                "rest was left out, or this copy is damaged"
            )
            self._breaches.add("truncated", None, what)
        elif tip not in (None, record.ledger_tip):
            what = f"head {record.sequence} names another ledger of {record.ledger_length} entries than this one"
            self._breaches.add("fork", trainer, what, entry=near)
        self._lineage.name(
            record.checkpoint_step,
            record.checkpoint,
            trainer,
            f"head {record.sequence} names another policy",
            entry=near,
        )


def _costs_nothing(entry: Signed[Any], fault: Fault) -> bool:
    """Whether nodes take an entry with this fault: one in evidence that it does not need."""
    return fault.where == "evidence" and isinstance(entry.record, Verdict) and entry.record.draw.drawn
