"""What the ledger's replay remembers of submissions, batches and steps: all that grows with its length.

Nothing of it may be forgotten: an appeal, a batch or a fork's proof may look back, and a rollout file counts once for
its author. It may lie anywhere, though.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.records import Batch, Submission, Trained, Verdict

TIP_BYTES: Final = 32

SubmissionState = Literal["pending", "disputed", "accepted", "rejected", "undecided"]


@dataclass
class LedgerSubmission:
    """One submission's life in the ledger."""

    record: Submission
    author: PeerId
    place: int = 0
    """Number of its entry."""
    state: SubmissionState = "pending"
    """`disputed`: validators contradict each other, and none of both sides has a quorum: another one must judge."""
    verdicts: dict[PeerId, Signed[Verdict]] = field(default_factory=dict)
    """The latest of each validator, in ledger order: a decision takes the place of an `undecided`."""
    used_in: int | None = None
    """The step whose batch it is in."""
    settled_at: int | None = None
    """The ledger's length with the entry that accepted or rejected it."""
    settled_step: int | None = None
    """Steps that were trained then."""
    appeal: bytes = b""
    """Id of the appeal on which it was accepted after a rejection."""

    def decided(self) -> set[PeerId]:
        """Validators that accept or reject it: these have no more to say."""
        return {peer for peer, one in list(self.verdicts.items()) if one.record.outcome != "undecided"}

    def was_judged_by(self, peer: PeerId, verdict: Verdict) -> bool:
        """Whether this validator has decided before, or said before that it cannot tell, and no more does now."""
        before = self.verdicts.get(peer)
        if before is None:
            return False
        again = verdict.outcome == "undecided" and verdict.appeal == before.record.appeal
        return again or before.record.outcome != "undecided"

    def rejections(self) -> list[Signed[Verdict]]:
        """Verdicts that reject it, in ledger order."""
        return [one for one in list(self.verdicts.values()) if one.record.outcome == "reject"]


@dataclass(frozen=True)
class Stale:
    """Accepted work that became too old for a batch: dropped, never trained."""

    submissions: int = 0
    rollouts: int = 0

    def plus(self, more: Collection[Submission]) -> Stale:
        return Stale(self.submissions + len(more), self.rollouts + sum(one.rollouts for one in more))


class Digests(Protocol):
    """A set of hashes that only grows."""

    def __contains__(self, digest: object, /) -> bool: ...

    def add(self, digest: bytes, /) -> None: ...


class Tips(Protocol):
    """The chain's tips, by length; other threads read those that are there while one adds."""

    def add(self, tip: bytes, /) -> None:
        """The next one."""

    def __getitem__(self, length: int, /) -> bytes:
        """After so many entries, of which there were that many."""


@dataclass
class TipsInMemory:
    """32 bytes each."""

    _tips: bytearray = field(default_factory=bytearray)

    def add(self, tip: bytes, /) -> None:
        self._tips += tip

    def __getitem__(self, length: int, /) -> bytes:
        return bytes(self._tips[length * TIP_BYTES : (length + 1) * TIP_BYTES])


def _nothing() -> None:
    """What is in memory alone has nothing to settle."""


@dataclass
class LedgerMemory:
    """Ordinary collections, or others that put most of it on a disk."""

    submissions: MutableMapping[bytes, LedgerSubmission] = field(default_factory=dict)
    files: Digests = field(default_factory=set[bytes])
    """Hashes over author and file."""
    committed: MutableMapping[int, Batch] = field(default_factory=dict)
    trained: MutableMapping[int, Trained] = field(default_factory=dict)
    tips: Tips = field(default_factory=TipsInMemory)
    settle: Callable[[], None] = _nothing
    """Called before each entry, when nothing is being changed."""


class BatchSubmissions(Mapping[int, tuple[bytes, ...]]):
    """The submissions of each step's batch, read from the entries."""

    def __init__(self, committed: Mapping[int, Batch]) -> None:
        self._committed = committed

    def __getitem__(self, step: int) -> tuple[bytes, ...]:
        return self._committed[step].submissions

    def __iter__(self) -> Iterator[int]:
        return iter(self._committed)

    def __len__(self) -> int:
        return len(self._committed)
