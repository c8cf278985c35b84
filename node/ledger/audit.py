"""The audit of a run: every entry of its ledger held against everything that is known, in one pass and flat memory.

Replays the very rules that nodes replay (protocol.ledger), and beside them keeps books of its own: balances from the
verdicts alone, the lineage of checkpoints, and the tips that the trainer signed in heads that drew. An entry that is
refused is a breach, and the audit goes on after it. What needs files, policies or an engine is node.ledger.recheck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from node.ledger.rows import leaderboard, run_row
from node.ledger.signatures import Checked, fault_kind
from protocol.draw import beacon_of, check_rate, is_drawn
from protocol.envelope import Signed, id_of, open_envelope
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.ledger import LedgerMemory, LedgerState, open_entry
from protocol.records import Batch, CheckpointManifest, Eviction, Head, Manifest, Trained, Verdict
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
    """Credits that evictions took."""
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
        self.state = LedgerState(manifest.id, manifest.record, memory=memory, signatures_checked=True)
        self.breaches = Breaches()
        self._kinds: Counter[str] = Counter()
        self._validators = {peer: ValidatorRow(str(peer)) for peer in manifest.record.validator_ids}
        self._balances = _Balances(self.state, self.breaches)
        self._lineage = _Lineage(self.state, self.breaches)
        self._beacons = _Beacons(self.state, self.breaches, self._lineage)

    def take(self, checked: Checked) -> None:
        """Hold one entry against the rules and the audit's own books. Raises MalformedError where the chain ends."""
        fault = checked.fault
        if fault is not None:
            self.breaches.add(fault.kind, _author(checked.data), fault.what, entry=checked.number)
            if fault.where == "entry" or not _is_drawn(checked.data):  # nodes refuse it
                return self.state.pass_over(id_of(checked.data))
        try:
            entry = self.state.apply(checked.data)
        except ProtocolError as error:
            self.breaches.add(fault_kind(error), _author(checked.data), error.message, entry=checked.number)
            return self.state.pass_over(id_of(checked.data))
        self._kinds[entry.record.KIND] += 1
        self._note(entry, checked.number)

    def finish(
        self, *, heads: Iterable[Signed[Head]] = (), checkpoints: Iterable[Signed[CheckpointManifest]] = ()
    ) -> None:
        """Compare with signed heads and checkpoints that are at hand, and close the books."""
        for head in heads:
            self._beacons.see(head, None)
        for checkpoint in checkpoints:
            self._lineage.held(checkpoint)
        self._balances.close()

    def report(self, notes: Sequence[str] = ()) -> Report:
        record = self.manifest.record
        return Report(
            run=run_row(self.state, RunAddress(self.manifest.author, record.name)),
            trainer=str(record.trainer_id),
            quorum=record.quorum,
            entries=dict(self._kinds),
            contributors=leaderboard(self.state),
            validators=list(self._validators.values()),
            forfeited=self._balances.forfeited,
            breaches=self.breaches.found,
            breaches_by_kind=dict(self.breaches.counts),
            notes=list(notes),
        )

    def _note(self, entry: Signed[Any], number: int) -> None:
        match entry.record:
            case Verdict():
                self._count(entry)
                self._balances.verdict(entry, number)
                self._beacons.verdict(entry, number)
            case Batch():
                self._lineage.batch(entry.record, number)
            case Trained():
                self._lineage.trained(entry.record, number)
            case Eviction():
                self._balances.eviction(entry.record)

    def _count(self, entry: Signed[Verdict]) -> None:
        row = self._validators[entry.author]
        setattr(row, entry.record.outcome, getattr(row, entry.record.outcome) + 1)
        row.hard += entry.record.outcome == "reject" and entry.record.hard
        row.in_full += entry.record.draw.drawn


class _Balances:
    """Credits by the verdicts alone, to be compared with what the rules make of them."""

    def __init__(self, state: LedgerState, breaches: Breaches) -> None:
        self._state = state
        self._breaches = breaches
        self._validators = frozenset(state.manifest.validator_ids)
        self._credits: Counter[PeerId] = Counter()
        self._earned = 0
        self._unpaid = 0
        self.forfeited = 0

    def verdict(self, entry: Signed[Verdict], number: int) -> None:
        one = self._state.submissions[entry.record.submission]
        votes = [signed.record.outcome for signed in one.verdicts.values()]
        quorum = self._state.manifest.quorum
        if entry.record.outcome != "accept" or one.state != "accepted" or votes.count("accept") != quorum:
            return
        if not one.verdicts.keys() <= self._validators:
            self._breaches.add("quorum", entry.author, "accepted by votes of others than validators", entry=number)
        tokens = one.record.output_tokens
        self._earned += tokens
        if self._state.contributors[one.author].standing == "evicted":
            self._unpaid += tokens
        else:
            self._credits[one.author] += tokens

    def eviction(self, record: Eviction) -> None:
        self.forfeited += self._credits.pop(PeerId(record.contributor), 0)

    def close(self) -> None:
        """Every credit is somebody's, was forfeited, or was never paid; and nobody has another balance."""
        for peer, one in self._state.contributors.items():
            if one.credits != self._credits[peer]:
                what = f"a balance of {one.credits} credits, where the verdicts give {self._credits[peer]}"
                self._breaches.add("balance", peer, what)
        if self._earned != self._credits.total() + self.forfeited + self._unpaid:
            self._breaches.add("balance", None, f"{self._earned} credits were earned; they do not add up")


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
            what = f"head {record.sequence} speaks of {record.ledger_length} entries; there are {self._state.length}"
            self._breaches.add("truncated", trainer, what)
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


def _author(data: bytes) -> PeerId | None:
    """Who an entry says it is by."""
    try:
        return open_entry(data, signature_checked=True).author
    except ProtocolError:
        return None


def _is_drawn(data: bytes) -> bool:
    try:
        record = open_entry(data, signature_checked=True).record
    except ProtocolError:
        return False
    return isinstance(record, Verdict) and record.draw.drawn
