"""What the ledger remembers of a contributor, read by other threads while one extends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest
from factories import VALIDATOR, make_submission, make_verdict

from protocol import standing
from protocol.identity import Identity
from protocol.ledger_memory import LedgerSubmission
from protocol.records import Submission
from protocol.standing import Steps

RUN = b"r" * 32
ALICE = Identity.from_phrase("alice")


def work(step: int, policy: int) -> Submission:
    return msgspec.structs.replace(make_submission(ALICE, RUN).record, step=step, checkpoint_step=policy)


def answers(steps: Steps) -> list[tuple[int, str]]:
    return [(steps.next_index(step), steps.policy_fault(work(step, policy))) for step in range(9) for policy in (1, 6)]


@contextmanager
def asked_at_each_line(steps: Steps) -> Iterator[list[Any]]:
    """What another thread would be told at any line of what the block runs."""
    told: list[Any] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != standing.__file__:
            return None
        told.append(answers(steps))
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield told
    finally:
        sys.settrace(outer)


@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_another_thread_sees_a_submission_whole_or_not_at_all(step: int) -> None:
    """Before all steps that are there, between two, one that is there, and after all: no row is another step's."""
    steps = Steps()
    for there, policy in ((2, 2), (5, 4), (7, 5)):
        steps.add(work(there, policy))
    before = answers(steps)
    with asked_at_each_line(steps) as told:
        steps.add(work(step, {1: 1, 4: 3, 5: 4, 8: 6}[step]))
    after = answers(steps)
    assert before != after
    assert len(told) > 3
    assert all(one in (before, after) for one in told)


def test_a_verdict_that_comes_while_the_others_are_read_is_no_error() -> None:
    submission = make_submission(ALICE, RUN)
    known = LedgerSubmission(submission.record, ALICE.peer_id)

    class Read:
        """A verdict; the ledger takes another one while it is looked at."""

        @property
        def record(self) -> Any:
            known.verdicts[ALICE.peer_id] = make_verdict(submission)
            return make_verdict(submission).record

    known.verdicts[VALIDATOR.peer_id] = Read()  # type: ignore[assignment]
    assert known.decided() == {VALIDATOR.peer_id}
    assert known.decided() == {VALIDATOR.peer_id, ALICE.peer_id}
