"""The audit of a run: every entry of its ledger held against everything that is known, in one pass and flat memory.

Replays the very rules that nodes replay (protocol.ledger), and beside them keeps books of its own: balances
(node.ledger.books), the lineage of checkpoints, and the tips that the trainer signed in heads that drew. An entry that
is refused is a breach, and the audit goes on after it. What needs files, policies or an engine is node.ledger.recheck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from node.ledger.blame import Breach, Breaches, Holes, refused
from node.ledger.books import Books
from node.ledger.duties import left
from node.ledger.rows import leaderboard, run_row
from node.ledger.signatures import Checked, Fault, fault_kind
from protocol.draw import beacon_of, check_rate, is_drawn
from protocol.envelope import Signed, id_of, open_envelope
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.ledger import LedgerMemory, LedgerState, LedgerSubmission
from protocol.records import Batch, CheckpointManifest, Eviction, Head, Manifest, Reinstatement, Trained, Verdict
from protocol.run import RunAddress

_HEADS: Final = 256


class ValidatorRow(msgspec.Struct):
    """What one validator said."""

    peer_id: str
    accept: int = 0
    reject: int = 0
    undecided: int = 0
    hard: int = 0
    in_full: int = 0
    """Verdicts with the costly checks made, or due."""
    overruled: int = 0
    """Accepts and rejects of what was settled the other way, by a quorum or on appeal, answers to appeals included."""

    @property
    def verdicts(self) -> int:
        return self.accept + self.reject + self.undecided


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
    """How many are open, granted, refused, undecided."""
    breaches: list[Breach]
    breaches_by_kind: dict[str, int]
    following: dict[str, int]
    """By kind: what may only follow from those, and is nobody's."""
    confirmed: int | None
    """So many entries are those of a head that the trainer signed; None where no head of its is of this copy."""
    notes: list[str]
    seconds: float = 0.0
    rechecked: list[dict[str, Any]] = []

    @property
    def clean(self) -> bool:
        """Whether what is here keeps all rules; whether it is all, `outcome` says."""
        return not self.breaches_by_kind

    @property
    def outcome(self) -> Literal["clean", "unconfirmed", "breaches"]:
        """`unconfirmed`: no breach, and no head at hand shows that the ledger ends where this copy does."""
        if not self.clean:
            return "breaches"
        return "clean" if self.confirmed == self.run["entries"] else "unconfirmed"


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
        self._holes = Holes(self.state)
        self._beacons = _Beacons(self.state, self.breaches, self._lineage, self._holes)
        self._notes: list[str] = []

    def take(self, checked: Checked) -> None:
        """Hold one entry against the rules and the audit's own books. Raises MalformedError where the chain ends."""
        entry, fault, number = checked.entry, checked.fault, checked.number
        if fault is not None:
            self._blame(fault, entry, number)
        if entry is None or (fault is not None and not _costs_nothing(entry, fault)):
            self._holes.add(None if fault is not None and fault.hides_entry else entry, number)
            return self.state.pass_over(id_of(checked.data))
        try:
            self.state.take(entry)
        except ProtocolError as error:
            self._refused(entry, error, number, is_proved=fault is None)
            return self.state.pass_over(entry.id)
        self._kinds[entry.record.KIND] += 1
        self._note(entry, number, is_proved=fault is None)

    def finish(
        self, *, heads: Iterable[Signed[Head]] = (), checkpoints: Iterable[Signed[CheckpointManifest]] = ()
    ) -> None:
        """Compare with signed heads and checkpoints that are at hand, and close the books."""
        heads = tuple(heads)
        for head in heads:
            self._beacons.see(head, None)
        for checkpoint in checkpoints:
            self._lineage.held(checkpoint)
        self._notes += self._lineage.close()
        self._beacons.close()
        self._books.close()
        self._close_duties(over=any(self._ends(head) for head in heads))
        self.breaches.close(self._beacons.confirmed or 0)

    def report(self, notes: Sequence[str] = ()) -> Report:
        record = self.manifest.record
        return Report(
            run=run_row(self.state, RunAddress(self.manifest.author, record.name)),
            trainer=str(record.trainer_id),
            quorum=record.quorum,
            entries=dict(self._kinds),
            contributors=leaderboard(self.state),
            validators=self.validators,
            forfeited=self._books.forfeited,
            appeals=dict(Counter(case.state for case in self.state.appeals.values())),
            breaches=self.breaches.found,
            breaches_by_kind=dict(self.breaches.counts),
            following=dict(self.breaches.following),
            confirmed=self._beacons.confirmed,
            notes=[*notes, *self._notes],
        )

    @property
    def confirmed(self) -> int | None:
        """As in the report, once it is finished."""
        return self._beacons.confirmed

    @property
    def validators(self) -> list[ValidatorRow]:
        """What each validator of the run said, in the manifest's order."""
        return list(self._validators.values())

    def _refused(self, entry: Signed[Any], error: ProtocolError, number: int, *, is_proved: bool) -> None:
        """Heads in a verdict are the trainer's word, whatever the rules say to the verdict."""
        kind = fault_kind(error)
        elsewhere = is_proved and isinstance(entry.record, Verdict) and self._beacons.drew_elsewhere(entry, number)
        named = elsewhere and kind == "draw"
        refused(self.breaches, self._holes, entry, kind, error.message, number=number, elsewhere=named)

    def _note(self, entry: Signed[Any], number: int, *, is_proved: bool) -> None:
        """`is_proved`: the signatures in its evidence hold, too, so that what they sign is their authors' word."""
        match entry.record:
            case Verdict():
                self._count(entry)
                self._books.verdict(entry, number)
                if is_proved:
                    self._beacons.verdict(entry, number)
            case Batch():
                self._lineage.batch(entry.record, number)
            case Trained():
                self._lineage.trained(entry.record, number)
            case Eviction():
                self._books.eviction(entry.record)
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
        for duty in left(self.state, over=over):
            if duty.overdue:
                follows = self._holes.about(duty.contributor)
                until = self.state.length
                self.breaches.add(duty.kind, trainer, duty.what, entry=duty.entry, until=until, follows=follows)
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
        one = self.state.submissions[entry.record.submission]
        appeal = self.state.appeals.get(entry.record.appeal)
        if one.settled_at == self.state.length:
            self._overrule(one)
        elif appeal is not None and appeal.state == "refused" and appeal.answer == entry.id:
            self._overrule_answers(one)

    def _overrule(self, one: LedgerSubmission) -> None:
        """With this entry it is settled: who had said the opposite? A granted appeal settles it a second time."""
        for peer, said in one.verdicts.items():
            record = said.record
            if record.outcome == ("reject" if one.state == "accepted" else "accept"):
                self._validators[peer].overruled += 1
            elif one.appeal and record.outcome == "accept" and not record.appeal:
                self._validators[peer].overruled -= 1

    def _overrule_answers(self, one: LedgerSubmission) -> None:
        """With this entry an appeal is refused: who had granted it?"""
        for peer, said in one.verdicts.items():
            self._validators[peer].overruled += bool(said.record.appeal) and said.record.outcome == "accept"


class _Lineage:
    """Which checkpoint is which step's: by the trainer's entries and heads, and by the work that it trained on.

    All of these the trainer has signed: it answers where two of them differ. Whoever handed in work of a policy named
    the one that it was given, as far as anybody can show.
    """

    def __init__(self, state: LedgerState, breaches: Breaches) -> None:
        self._state = state
        self._breaches = breaches
        self._known: dict[int, bytes] = {}
        self._claimed: dict[int, list[tuple[bytes, str, int]]] = {}
        """By step of which the trainer has named none: what its batches' work names, each checkpoint once."""
        self._strange = 0
        """Manifests at hand that the trainer has not signed."""

    def batch(self, batch: Batch, number: int) -> None:
        for key in batch.submissions:
            record = self._state.submissions[key].record
            known = self._known.get(record.checkpoint_step)
            if known == record.checkpoint:
                continue
            what = f"submission {key.hex()[:12]}, which step {batch.step} trains on, names another policy"
            claim = (record.checkpoint, what, number)
            if known is not None:
                self._differs(known, *claim)
                continue
            claims = self._claimed.setdefault(record.checkpoint_step, [])
            if all(record.checkpoint != named for named, *_ in claims):
                claims.append(claim)

    def trained(self, record: Trained, number: int) -> None:
        what = f"step {record.step} gave checkpoint {record.checkpoint.hex()[:12]}"
        self.named(record.step + 1, record.checkpoint, what, entry=number)

    def held(self, checkpoint: Signed[CheckpointManifest]) -> None:
        """A checkpoint's manifest that is at hand."""
        if checkpoint.author != self._state.manifest.trainer_id:
            self._strange += 1  # anybody can put one into a directory
            return
        what = f"the manifest of checkpoint {checkpoint.record.step} at hand is another one"
        self.named(checkpoint.record.step, checkpoint.id, what)

    def named(self, step: int, checkpoint: bytes, what: str, *, entry: int | None = None) -> None:
        """The trainer has signed which checkpoint is a step's."""
        known = self._known.setdefault(step, checkpoint)
        if known != checkpoint:
            self._differs(known, checkpoint, what, entry)
        for claim in self._claimed.pop(step, ()):
            if claim[0] != known:
                self._differs(known, *claim)

    def close(self) -> list[str]:
        """Two policies of a step of which the trainer has named none: it trained on both. Returns notes."""
        for claims in self._claimed.values():
            for claim in claims[1:]:
                self._differs(claims[0][0], *claim)
        return [f"checkpoints' manifests that the trainer has not signed, and that say nothing: {self._strange}"][
            : self._strange
        ]

    def _differs(self, known: bytes, named: bytes, what: str, entry: int | None) -> None:
        what = f"{what}: {named.hex()[:12]}, not {known.hex()[:12]}"
        self._breaches.add("lineage", self._state.manifest.trainer_id, what, entry=entry)


class _Beacons:
    """Heads that the trainer signed: what they say of the ledger and of checkpoints must be so."""

    def __init__(self, state: LedgerState, breaches: Breaches, lineage: _Lineage, holes: Holes) -> None:
        self._state = state
        self._breaches = breaches
        self._lineage = lineage
        self._holes = holes
        self._seen = lru_cache(maxsize=_HEADS)(self._see_once)
        self.confirmed: int | None = None
        """The first so many entries are those that the trainer signed: the longest that a head of its agrees with."""
        self._others: tuple[int, int, int | None] | None = None
        """Of the shortest head that does not agree: its ledger's length, its number, and near which entry it was."""

    def verdict(self, entry: Signed[Verdict], number: int) -> None:
        """Draws that excuse from the costly checks were proved by the rules; here are those that ask for them."""
        draw, head = entry.record.draw, self._head_of(entry, number)
        if head is not None and not self._is_ours(head):
            what = "the head in a verdict's draw is of another trainer or run"
            return self._breaches.add("evidence", entry.author, what, entry=number)
        if head is None or not draw.drawn or self._is_elsewhere(head):
            return None
        contributor = PeerId(entry.record.contributor)
        rate = check_rate(self._state.record(contributor, head.record.ledger_length), self._state.manifest.checks)
        if draw.rate != rate or not is_drawn(beacon_of(head), entry.record.submission, rate=rate):
            what = (
                f"drawn at a rate of {draw.rate:.4g}, it says; the ledger gives {rate:.4g}, and its beacon no such draw"
            )
            follows = self._holes.about(contributor)
            self._breaches.add("draw", entry.author, what, entry=number, until=number + 1, follows=follows)
        return None

    def drew_elsewhere(self, entry: Signed[Verdict], number: int) -> bool:
        """Whether a verdict's head, by the trainer, names another ledger than this one: its author drew by that."""
        head = self._head_of(entry, number)
        return head is not None and self._is_ours(head) and self._is_elsewhere(head)

    def _head_of(self, entry: Signed[Verdict], number: int) -> Signed[Head] | None:
        beacon = entry.record.draw.beacon
        return self._seen(beacon, number - number % _HEADS) if beacon else None

    def _is_elsewhere(self, head: Signed[Head]) -> bool:
        return self._state.tip_at(head.record.ledger_length) != head.record.ledger_tip

    def _see_once(self, data: bytes, near: int) -> Signed[Head] | None:
        try:
            head = open_envelope(data, Head, signature_checked=True)
        except ProtocolError:
            return None  # the signatures' check has said so
        self.see(head, near)
        return head

    def _is_ours(self, head: Signed[Head]) -> bool:
        return head.author == self._state.manifest.trainer_id and head.record.run_id == self._state.run_id

    def see(self, head: Signed[Head], near: int | None) -> None:
        """A head from about entry `near` or from elsewhere; it tells of this run if the trainer has signed it."""
        record = head.record
        if not self._is_ours(head):
            return
        tip = self._state.tip_at(record.ledger_length)
        if tip == record.ledger_tip:
            self.confirmed = max(self.confirmed or 0, record.ledger_length)
        elif tip is not None or near is not None:  # nor can an entry lie before the end of the ledger that it names
            other = (record.ledger_length, record.sequence, near)
            self._others = other if self._others is None else min(self._others, other, key=lambda one: one[0])
        else:
            what = (
                f"head {record.sequence} speaks of {record.ledger_length} entries; there are {self._state.length}: the "
                "rest was left out, or this copy is damaged"
            )
            self._breaches.add("truncated", None, what)
        what = f"head {record.sequence} names another policy"
        self._lineage.named(record.checkpoint_step, record.checkpoint, what, entry=near)

    def close(self) -> None:
        """A head that contradicts this copy convicts the trainer only if it signed this copy as well, as far or
        further; otherwise whoever kept the copy may have changed it."""
        if self._others is None:
            return
        length, sequence, near = self._others
        what = f"head {sequence} names another ledger of {length} entries than this one"
        if self.confirmed is not None and length <= self.confirmed:
            what = f"{what}, of which the trainer has signed {self.confirmed}"
            self._breaches.add("fork", self._state.manifest.trainer_id, what, entry=near)
        else:
            self._breaches.add("chain", None, f"{what}: this copy was changed, or the trainer has two", entry=near)


def _costs_nothing(entry: Signed[Any], fault: Fault) -> bool:
    """Whether nodes take an entry with this fault: one in evidence that it does not need."""
    return fault.where == "evidence" and isinstance(entry.record, Verdict) and entry.record.draw.drawn
