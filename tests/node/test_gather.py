"""A step's batch as it comes together: signal, tries, what is asked for, what its metrics say."""

from __future__ import annotations

from typing import Any

import pytest
from factories import make_manifest, make_submission

from node.trainer.gather import Gathered, Signals, batch_metrics, gather, silent_groups_of, wants_more, with_length
from protocol.batches import Tally
from protocol.identity import Identity
from protocol.ledger import LedgerSubmission
from protocol.lengths import length_target
from protocol.records import BatchSpec, LengthSpec, Manifest, RolloutSpec
from protocol.seeds import prompt_seed, submission_seed

ALICE = Identity.from_phrase("alice")
RUN = b"r" * 32
KEYS = [bytes([number]) * 32 for number in range(9)]
LIMITS: dict[str, Any] = {
    "group_size": 2,
    "prompts_per_submission": 2,
    "max_new_tokens": 20,
    "temperature": 1.0,
    "max_submissions_per_step": 4,
}


def run(*, length: LengthSpec | None = None, **batch: Any) -> Manifest:
    """Submissions of two groups of two; a batch is 8 rollouts."""
    return make_manifest(
        batch=BatchSpec(rollouts_per_step=8, max_staleness=1, total_steps=3, **batch),
        rollout=RolloutSpec(**LIMITS, length=length),
    )


FILTERED = run(signal_only=True, max_tries=2)


def rows(*rewards: float) -> list[dict[str, Any]]:
    """A submission's rows, its groups one after another."""
    return [
        {"prompt_index": number // 2, "member": number % 2, "output_ids": [5] * (number + 1), "reward": reward}
        for number, reward in enumerate(rewards)
    ]


def test_a_group_is_silent_if_all_its_rewards_are_equal() -> None:
    assert silent_groups_of(FILTERED, rows(1.0, 1.0, 0.0, 1.0)) == (True, False)
    nan = float("nan")
    assert silent_groups_of(FILTERED, rows(nan, 1.0, nan, nan)) == (True, True), "nothing to compare with"


def test_the_batch_is_the_shortest_beginning_that_has_enough_signal() -> None:
    both, half, none = (False, False), (True, False), (True, True)
    silent = dict(zip(KEYS, (half, none, half, half, both), strict=False))
    found = gather(FILTERED, KEYS[:5], silent, waited_s=0)
    assert (found.ended, found.submissions) == ("tries", tuple(KEYS[:4])), "four submissions are all it may try"
    silent |= {KEYS[1]: half, KEYS[2]: both}
    found = gather(FILTERED, KEYS[:5], silent, waited_s=0)
    assert (found.ended, found.submissions, found.tally.rollouts) == ("whole", tuple(KEYS[:3]), 8)
    found = gather(FILTERED, KEYS[:2], silent, waited_s=1e9)
    assert (found.ended, found.tally) == (None, Tally(2, 4))
    assert found.silent == (True, False, True, False)


def test_the_same_entries_make_the_same_batch_whatever_came_later() -> None:
    """Replay: what the ledger holds beyond a batch's end does not change the batch."""
    silent = dict.fromkeys(KEYS, (False, True))
    made = {gather(FILTERED, KEYS[:count], silent, waited_s=0.0) for count in (4, 5, 9)}
    assert len(made) == 1


def test_without_a_filter_every_rollout_counts_and_nothing_is_read() -> None:
    assert gather(run(), KEYS[:3], {}, waited_s=0) == Gathered(tuple(KEYS[:2]), (), Tally(2, 8), "whole")


async def test_files_are_read_once_and_forgotten_when_they_are_used_up() -> None:
    read: list[bytes] = []

    async def reader(key: bytes) -> list[dict[str, Any]]:
        read.append(key)
        return rows(1.0, 1.0, 0.0, 1.0)

    signals = Signals(FILTERED, reader)
    assert await signals.read(KEYS[:2]) == dict.fromkeys(KEYS[:2], (True, False))
    assert set(await signals.read(KEYS[1:3])) == set(KEYS[1:3])
    assert read == KEYS[:3]
    assert await Signals(run(), reader).read(KEYS) == {}


def test_more_is_asked_for_while_groups_turn_out_silent() -> None:
    patient = run(signal_only=True, max_tries=4)

    def wants(submissions: int, rollouts: int, pending: int, manifest: Manifest = patient) -> bool:
        return wants_more(manifest, Gathered((), (), Tally(submissions, rollouts), None), pending=pending)

    assert wants(0, 0, 2)
    assert not wants(0, 0, 3), "what is on its way is taken to teach something until it is known not to"
    assert wants(2, 0, 3), "two taught nothing, so three more are not enough"
    assert not wants(2, 0, 8), "more than the step may try"
    assert not wants(1, 4, 2, run())


SPEC = LengthSpec(targets=(2, 9), alpha=0.01)


def test_task_reward_and_length_penalty_are_told_apart_by_the_seed_alone() -> None:
    """A contributor cannot say what its target was: the trainer derives it from the signed submission."""
    manifest, signed = run(length=SPEC), make_submission(ALICE, RUN, step=1, index=3)
    seed = submission_seed(
        RUN, 1, checkpoint=signed.record.checkpoint, contributor_key=ALICE.peer_id.public_key, index=3
    )
    targets = [length_target(SPEC, prompt_seed(seed, place)) for place in range(2)]
    penalties = [0.01 * abs(number + 1 - targets[number // 2]) for number in range(4)]
    handed_in = rows(*(1.0 - penalty for penalty in penalties))
    found = with_length(manifest, RUN, LedgerSubmission(signed.record, ALICE.peer_id), handed_in)
    assert [row["length_penalty"] for row in found] == pytest.approx(penalties)
    metrics = batch_metrics(manifest, found, [False, False], skipped=False)
    assert metrics["task_reward"] == pytest.approx(1.0)
    assert metrics["length_penalty"] == pytest.approx(sum(penalties) / 4)
    assert metrics["reward"] == pytest.approx(1.0 - sum(penalties) / 4)


def test_silent_groups_are_in_the_metrics_of_the_batch_they_were_left_out_of() -> None:
    metrics = batch_metrics(FILTERED, rows(1.0, 1.0, 0.0, 1.0), [True, False], skipped=True)
    assert metrics == {"reward": 0.75, "rollouts_collected": 4.0, "groups_without_signal": 1.0, "skipped_step": 1.0}
