"""When a step's batch is full: rollouts that teach something are counted, tries and time are bounded.

A group whose rewards are all equal moves nothing (its advantages are 0). Where a run says `signal_only`, only the other
groups count, and more submissions are asked for until there are enough (INTELLECT-2, section 3.3). The trainer writes
into its batch entry which groups had no signal and why it waited no longer, so that a replay knows what was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from protocol.constants import MAX_BATCH_SUBMISSIONS
from protocol.errors import MalformedError
from protocol.records import Batch, BatchSpec, Manifest

Ending = Literal["whole", "tries", "deadline"]


@dataclass(frozen=True)
class Tally:
    """What a step has: submissions, and rollouts that count."""

    submissions: int
    rollouts: int


class BatchRules(Protocol):
    """A manifest, or a recipe that becomes one."""

    @property
    def batch(self) -> BatchSpec: ...

    @property
    def rollouts_per_submission(self) -> int: ...


def wanted_submissions(manifest: BatchRules) -> int:
    """Submissions of a batch in which every rollout counts."""
    return -(-manifest.batch.rollouts_per_step // manifest.rollouts_per_submission)


def most_submissions(manifest: BatchRules) -> int:
    """Submissions that a step takes at most."""
    tries = manifest.batch.max_tries if manifest.batch.signal_only else 1
    return min(MAX_BATCH_SUBMISSIONS, tries * wanted_submissions(manifest))


def least_rollouts(manifest: Manifest) -> int:
    """Rollouts that count, without which a step leaves the policy as it is."""
    return max(manifest.rollout.group_size, round(manifest.batch.minimum_share * manifest.batch.rollouts_per_step))


def how_it_ends(manifest: Manifest, tally: Tally, *, waited_s: float) -> Ending | None:
    """Why a step takes no more submissions; None while it should.

    A deadline passes a batch that has enough to be trained, or has taken as many submissions as it would without a
    filter and still lacks signal. With fewer submissions than that, nobody is there, and the step goes on waiting.
    """
    if tally.rollouts >= manifest.batch.rollouts_per_step:
        return "whole"
    if tally.submissions >= most_submissions(manifest):
        return "tries"
    tried = tally.rollouts >= least_rollouts(manifest) or tally.submissions >= wanted_submissions(manifest)
    late = manifest.batch.deadline_s is not None and waited_s >= manifest.batch.deadline_s
    return "deadline" if late and tried else None


def is_trained(manifest: Manifest, tally: Tally) -> bool:
    """Whether a batch that ended has enough to be trained."""
    return tally.rollouts >= least_rollouts(manifest)


def tally_of(manifest: Manifest, batch: Batch) -> Tally:
    """What a batch entry holds. Raises MalformedError where its `silent` does not fit its submissions."""
    silent = silent_groups(manifest, batch)
    return Tally(len(batch.submissions), silent.count(False) * manifest.rollout.group_size)


def silent_groups(manifest: Manifest, batch: Batch) -> list[bool]:
    """For each group of a batch, in order, whether it was left out. Raises MalformedError."""
    groups = len(batch.submissions) * manifest.rollout.prompts_per_submission
    if manifest.batch.signal_only:
        return unpack_bits(batch.silent, groups)
    if batch.silent:
        raise MalformedError("a batch leaves groups out in a run that trains on all of them")
    return [False] * groups


def fault_of(manifest: Manifest, batch: Batch, *, waited_s: float) -> str:
    """Why a batch entry may not end as it says; empty if it may. `waited_s`: the longest it can have been open."""
    if not manifest.batch.signal_only and manifest.batch.deadline_s is None:
        return "" if not batch.silent and batch.ended == "whole" else "nothing may be left out in this run"
    try:
        tally = tally_of(manifest, batch)
    except MalformedError as error:
        return error.message
    if tally.submissions > most_submissions(manifest):
        return f"{tally.submissions} submissions; a step takes {most_submissions(manifest)} at most"
    ending = how_it_ends(manifest, tally, waited_s=waited_s)
    if ending == batch.ended:
        return ""
    return (
        f"it says that it ended by {batch.ended}, and has {tally.rollouts} of {manifest.batch.rollouts_per_step} "
        f"rollouts from {tally.submissions} submissions after {waited_s:.0f} s at most"
    )


def pack_bits(flags: Sequence[bool]) -> bytes:
    """Flag i becomes bit i mod 8 of byte i div 8."""
    packed = bytearray(-(-len(flags) // 8))
    for place, flag in enumerate(flags):
        packed[place // 8] |= flag << place % 8
    return bytes(packed)


def unpack_bits(data: bytes, count: int) -> list[bool]:
    """The `count` flags that `pack_bits` packed. Raises MalformedError for another length or bits beyond."""
    if len(data) != -(-count // 8):
        raise MalformedError(f"{len(data)} bytes of flags for {count} groups")
    if count % 8 and data[-1] >> count % 8:
        raise MalformedError("flags are set beyond the last group")
    return [bool(data[place // 8] >> place % 8 & 1) for place in range(count)]
