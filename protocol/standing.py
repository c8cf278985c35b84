"""What the ledger remembers of one contributor, in few bytes a submission, since a run has millions of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Literal

from protocol.balances import Balance
from protocol.draw import TrackRecord
from protocol.records import Submission


def _numbers() -> array[int]:
    return array("Q")


@dataclass
class History:
    """The ledger's lengths at which submissions were settled; 8 bytes each."""

    accepted: array[int] = field(default_factory=_numbers)
    rejected: array[int] = field(default_factory=_numbers)
    overturned: dict[int, int] = field(default_factory=dict)
    """By the length of a rejection: that of the answer which took it back. Few, if any."""

    def add(self, length: int, *, accepted: bool) -> None:
        """One more was settled by the entry that made the ledger so long."""
        insort(self.accepted if accepted else self.rejected, length)

    def overturn(self, rejected_at: int, length: int) -> None:
        """An appeal was granted by the entry that made the ledger so long: from here on it was no rejection."""
        self.overturned[rejected_at] = length
        self.add(length, accepted=True)

    def at(self, length: int) -> TrackRecord:
        """The record after the first `length` entries."""
        accepted, rejected = bisect_right(self.accepted, length), bisect_right(self.rejected, length)
        gone = {at for at, since in list(self.overturned.items()) if since <= length}
        last = next((self.rejected[at] for at in range(rejected - 1, -1, -1) if self.rejected[at] not in gone), 0)
        return TrackRecord(accepted, rejected - len(gone), accepted - bisect_right(self.accepted, last))


@dataclass
class _StepRows:
    """Four columns, of which `steps` is the shortest while a row is being added at the end."""

    steps: array[int] = field(default_factory=_numbers)
    next_indices: array[int] = field(default_factory=_numbers)
    first_policies: array[int] = field(default_factory=_numbers)
    latest_policies: array[int] = field(default_factory=_numbers)

    def find(self, step: int) -> int | None:
        place = bisect_left(self.steps, step)
        return place if place < len(self.steps) and self.steps[place] == step else None

    def insert(self, place: int, step: int, policy: int) -> None:
        self.next_indices.insert(place, 1)
        self.first_policies.insert(place, policy)
        self.latest_policies.insert(place, policy)
        self.steps.insert(place, step)

    def copy(self) -> _StepRows:
        return _StepRows(self.steps[:], self.next_indices[:], self.first_policies[:], self.latest_policies[:])


@dataclass
class Steps:
    """What was handed in, by rising step: the index that comes next, and the first and the latest policy; 32 bytes.

    One thread adds; others may read meanwhile, each from the rows as they were at some moment.
    """

    _rows: _StepRows = field(default_factory=_StepRows)

    def next_index(self, step: int) -> int:
        rows = self._rows
        place = rows.find(step)
        return 0 if place is None else rows.next_indices[place]

    def add(self, record: Submission) -> None:
        """One more submission, of the index that came next."""
        rows = self._rows
        place = rows.find(record.step)
        if place is not None:
            rows.latest_policies[place] = record.checkpoint_step
            rows.next_indices[place] += 1
            return
        place = bisect_left(rows.steps, record.step)
        if place < len(rows.steps):
            rows = rows.copy()  # what moves would be another step's to whoever reads now; that is rare
        rows.insert(place, record.step, record.checkpoint_step)
        self._rows = rows

    def policy_fault(self, record: Submission) -> str:
        """Why this policy cannot come next at its step; empty if it can."""
        rows, count = self._rows, len(self._rows.steps)
        place = bisect_right(rows.steps, record.step, 0, count)
        if place and record.checkpoint_step < (latest := rows.latest_policies[place - 1]):
            return (
                f"checkpoint {record.checkpoint_step} after checkpoint {latest}, which it used at step "
                f"{rows.steps[place - 1]}"
            )
        if place < count and record.checkpoint_step > (following := rows.first_policies[place]):
            return f"checkpoint {record.checkpoint_step} before {following}, which it used at step {rows.steps[place]}"
        return ""


@dataclass
class Contributor:
    """Standing and credits of one contributor."""

    standing: Literal["active", "evicted"] = "active"
    reason: str = ""
    accepted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    balance: Balance = field(default_factory=Balance)
    evicted_for: bytes = b""
    """The submission whose rejection evicted it."""
    evicted_step: int | None = None
    """Steps that were trained then."""
    admitted_at: int | None = None
    """Number of the entry that admitted it, where the run asks for one."""
    next_appeal: int = 0
    """Trained steps that the run must have before it may appeal again."""
    steps: Steps = field(default_factory=Steps)
    history: History = field(default_factory=History)

    @property
    def credits(self) -> int:
        """What it has earned and not lost: `mature` and `maturing`, in the unit that the manifest says."""
        return self.balance.credits
