"""Accepted submissions that are in no batch: which the next may hold, and what became too old for any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.identity import PeerId
from protocol.ledger_memory import LedgerSubmission, Stale
from protocol.manifest import BatchSpec
from protocol.records import Batch, Trained
from protocol.standing import Contributor


@dataclass
class Shelf:
    """A view of the ledger's submissions, and the ids of those that wait. Takes few of them at a time into memory."""

    _spec: BatchSpec
    _submissions: Mapping[bytes, LedgerSubmission]
    _contributors: Mapping[PeerId, Contributor]
    _trained: Mapping[int, Trained]
    _waiting: dict[bytes, int] = field(default_factory=dict)
    """Accepted, and the number of their entry."""
    _stale: Stale = field(default_factory=Stale)
    """Those that no batch can hold any more."""

    def put(self, key: bytes) -> None:
        """A submission was accepted."""
        self._waiting[key] = self._submissions[key].place

    def usable(self, step: int) -> list[bytes]:
        """What a batch for `step` may hold, in ledger order."""
        waiting = sorted(self._waiting, key=self._waiting.__getitem__)
        return [key for key in waiting if self.why_unusable(self._submissions[key], step) is None]

    def stale(self, step: int) -> Stale:
        """What no batch from `step` on can use any more, `step` being the next or a later one."""
        return self._stale.plus([self._submissions[key].record for key in self._too_old(step)])

    def is_too_old(self, submission: LedgerSubmission, step: int) -> bool:
        """Whether it is accepted, in no batch, and of a policy that no batch from `step` on can use."""
        unused = submission.state == "accepted" and submission.used_in is None
        return unused and submission.record.checkpoint_step < step - self._spec.max_staleness

    def take(self, batch: Batch) -> None:
        """A batch was committed: what it holds is used, and what is too old for the next is none of the waiting."""
        for key in batch.submissions:
            self._submissions[key].used_in = batch.step
            del self._waiting[key]
        self._stale = self.stale(batch.step + 1)
        for key in self._too_old(batch.step + 1):
            del self._waiting[key]

    def why_unusable(self, submission: LedgerSubmission, step: int) -> str | None:
        """Why a batch for `step` may not hold it; None if it may."""
        if submission.state != "accepted":
            return submission.state
        if submission.appeal:
            return "it was accepted on appeal, after its time"
        if submission.used_in is not None:
            return f"already trained at step {submission.used_in}"
        if self._contributors[submission.author].standing == "evicted":
            return "its contributor is evicted"
        policy = submission.record.checkpoint_step
        if not step - self._spec.max_staleness <= policy <= step:
            return f"its policy is checkpoint {policy}"
        gave = self._trained.get(policy - 1)
        if gave is not None and gave.checkpoint != submission.record.checkpoint:
            return f"it names another policy than the one that step {policy - 1} gave"
        return None

    def _too_old(self, step: int) -> list[bytes]:
        return [key for key in self._waiting if self.is_too_old(self._submissions[key], step)]
