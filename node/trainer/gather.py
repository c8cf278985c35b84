"""A step's batch as it comes together: which submissions, which of their groups teach something, when it is enough.

A group has signal if its rewards are not all equal; that is read from each accepted file once. Everything else follows
from the ledger and the manifest (protocol.batches), so the same entries make the same batch. Leaves out waiting and
committing (node.trainer.role).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol.batches import Ending, Tally, how_it_ends, most_submissions
from protocol.ledger import LedgerSubmission
from protocol.lengths import length_penalty, length_target
from protocol.records import Manifest
from protocol.seeds import prompt_seed, submission_seed

SURPLUS: Final = 1.25
"""Collecting pauses when so many times the batch is on its way, so that nobody works for nothing."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Gathered:
    """What a step has so far; it is to be committed once `ended` says why."""

    submissions: tuple[bytes, ...]
    silent: tuple[bool, ...]
    """For each group, in order, whether its rewards are all equal; empty where the run trains on those too."""
    tally: Tally
    ended: Ending | None


class Signals:
    """Which groups of accepted submissions are silent. `read` gives a file's rows."""

    def __init__(self, manifest: Manifest, read: Callable[[bytes], Awaitable[Rows]]) -> None:
        self._manifest = manifest
        self._read = read
        self._silent: dict[bytes, tuple[bool, ...]] = {}

    async def read(self, keys: Sequence[bytes]) -> Mapping[bytes, tuple[bool, ...]]:
        """Those of these submissions, read if they were not; others are forgotten. Raises what `read` does."""
        if not self._manifest.batch.signal_only:
            return {}
        for key in keys:
            if key not in self._silent:
                self._silent[key] = silent_groups_of(self._manifest, await self._read(key))
        self._silent = {key: self._silent[key] for key in keys}
        return self._silent


def silent_groups_of(manifest: Manifest, rows: Rows) -> tuple[bool, ...]:
    """For each group of a submission's rows whether its rewards, as far as they could be told, are all equal."""
    size = manifest.rollout.group_size
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return tuple(len({row["reward"] for row in told(group)}) <= 1 for group in groups)


def told(rows: Rows) -> Rows:
    """Those whose reward the environment could tell."""
    return [row for row in rows if not math.isnan(row["reward"])]


def gather(
    manifest: Manifest, usable: Sequence[bytes], silent: Mapping[bytes, Sequence[bool]], *, waited_s: float
) -> Gathered:
    """The shortest beginning of what is usable, in ledger order, that ends the step; all of it while none does."""
    filtered = manifest.batch.signal_only
    rollouts, flags = 0, list[bool]()
    for count, key in enumerate(usable, start=1):
        if filtered:
            flags += silent[key]
        kept = silent[key].count(False) * manifest.rollout.group_size if filtered else manifest.rollouts_per_submission
        rollouts += kept
        tally = Tally(count, rollouts)
        ended = how_it_ends(manifest, tally, waited_s=0.0)
        if ended is not None:
            return Gathered(tuple(usable[:count]), tuple(flags), tally, ended)
    tally = Tally(len(usable), rollouts)
    ended = how_it_ends(manifest, tally, waited_s=waited_s) if usable else None
    return Gathered(tuple(usable), tuple(flags), tally, ended)


def wants_more(manifest: Manifest, gathered: Gathered, *, pending: int) -> bool:
    """Whether contributors should go on, with so many submissions still to be judged.

    What is pending is taken to teach as much as what has come, with one submission of signal throughout added to it.
    """
    tally, share = gathered.tally, manifest.rollouts_per_submission
    if tally.submissions + pending >= SURPLUS * most_submissions(manifest):
        return False
    yielded = (tally.rollouts + share) / ((tally.submissions + 1) * share)
    return tally.rollouts + pending * share * yielded < SURPLUS * manifest.batch.rollouts_per_step


def with_length(manifest: Manifest, run_id: bytes, one: LedgerSubmission, rows: Rows) -> Rows:
    """A submission's rows, with what each answer lost to its length; what was asked for follows from the seed alone."""
    spec = manifest.rollout.length
    if spec is None:
        return rows
    record = one.record
    seed = submission_seed(
        run_id,
        record.step,
        checkpoint=record.checkpoint,
        contributor_key=one.author.public_key,
        index=record.index,
    )
    targets = [length_target(spec, prompt_seed(seed, at)) for at in range(manifest.rollout.prompts_per_submission)]
    return [
        row
        | {"length_penalty": length_penalty(spec, target=targets[row["prompt_index"]], tokens=len(row["output_ids"]))}
        for row in rows
    ]


def batch_metrics(manifest: Manifest, rows: Rows, silent: Sequence[bool], *, skipped: bool) -> dict[str, float]:
    """What a step's rollouts were like, those of silent groups among them; `skipped`: none of them was trained on."""
    judged = told(rows)
    rewards = [row["reward"] for row in judged]
    found = {"reward": _mean(rewards)}
    if manifest.rollout.length is not None:
        penalties = [row["length_penalty"] for row in judged]
        found["length_penalty"] = _mean(penalties)
        found["task_reward"] = _mean([reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)])
    if manifest.batch.signal_only:
        found["rollouts_collected"] = float(len(rows))
        found["groups_without_signal"] = float(sum(silent))
        found["skipped_step"] = float(skipped)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
