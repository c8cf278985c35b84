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
class Steps:
    """What was handed in, by rising step: the index that comes next, and the first and the latest policy; 32 bytes."""

    steps: array[int] = field(default_factory=_numbers)
    next_indices: array[int] = field(default_factory=_numbers)
    first_policies: array[int] = field(default_factory=_numbers)
    latest_policies: array[int] = field(default_factory=_numbers)

    def next_index(self, step: int) -> int:
        place = bisect_left(self.steps, step)
        return self.next_indices[place] if self._is_at(place, step) else 0

    def add(self, record: Submission) -> None:
        """One more submission, of the index that came next."""
        place = bisect_left(self.steps, record.step)
        if self._is_at(place, record.step):
            self.next_indices[place] += 1
            self.latest_policies[place] = record.checkpoint_step
            return
        self.steps.insert(place, record.step)
        self.next_indices.insert(place, 1)
        self.first_policies.insert(place, record.checkpoint_step)
        self.latest_policies.insert(place, record.checkpoint_step)

    def policy_fault(self, record: Submission) -> str:
        """Why this policy cannot come next at its step; empty if it can."""
        place = bisect_right(self.steps, record.step)
        if place and record.checkpoint_step < (latest := self.latest_policies[place - 1]):
            return (
                f"checkpoint {record.checkpoint_step} after checkpoint {latest}, which it used at step "
                f"{self.steps[place - 1]}"
            )
        if place < len(self.steps) and record.checkpoint_step > (following := self.first_policies[place]):
            return f"checkpoint {record.checkpoint_step} before {following}, which it used at step {self.steps[place]}"
        return ""

    def _is_at(self, place: int, step: int) -> bool:
        return place < len(self.steps) and self.steps[place] == step


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
