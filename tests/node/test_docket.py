"""The validator's docket: a case that was opened is judged, whatever happens in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_submission, make_verdict, receipt_of

from node.validator.docket import Docket
from protocol.identity import Identity

RUN = b"r" * 32
ALICE = Identity.from_phrase("alice")
FIRST_RELAY, OTHER_RELAY = Identity.from_phrase("relay"), Identity.from_phrase("other")
RELAY, OTHER = FIRST_RELAY.peer_id, OTHER_RELAY.peer_id


@pytest.fixture
def docket(tmp_path: Path) -> Docket:
    return Docket(tmp_path / "docket.sqlite")


def test_open_case_survives_a_restart_until_its_verdict(tmp_path: Path, docket: Docket) -> None:
    submission = make_submission(ALICE, RUN)
    docket.open(submission, receipt_of(submission), seen_sequence=4)
    again = Docket(tmp_path / "docket.sqlite")
    (case,) = again.opened(9)
    assert (case.submission.id, case.seen_sequence, case.relays) == (submission.id, 4, (RELAY,))
    again.add(make_verdict(submission))
    assert again.opened(9) == []
    assert again.judged(submission.id)


def test_first_receipt_stays_and_every_relay_that_has_the_file_is_remembered(docket: Docket) -> None:
    """A relay that shows a submission late must not move its beacon."""
    submission = make_submission(ALICE, RUN)
    docket.open(submission, receipt_of(submission, head_sequence=3), seen_sequence=4)
    docket.open(submission, receipt_of(submission, by=OTHER_RELAY, head_sequence=9), seen_sequence=9)
    (case,) = docket.opened(9)
    assert (case.receipt.record.head_sequence, case.seen_sequence) == (3, 4)
    assert case.relays == (RELAY, OTHER)


def test_every_relay_gets_every_verdict_once(docket: Docket) -> None:
    verdict = make_verdict(make_submission(ALICE, RUN))
    docket.add(verdict)
    docket.posted(verdict.record.submission, RELAY)
    assert docket.unposted(RELAY) == []
    assert docket.unposted(OTHER) == [(verdict.record.submission, verdict.data)]


def test_first_verdict_about_a_submission_stays(docket: Docket) -> None:
    submission = make_submission(ALICE, RUN)
    docket.add(make_verdict(submission))
    docket.add(make_verdict(submission, outcome="reject", reason="toploc: other"))
    assert docket.outcomes() == {"accept": 1}


def test_rejections_are_counted_by_check(docket: Docket) -> None:
    for index in (0, 1):
        submission = make_submission(ALICE, RUN, index=index)
        docket.add(make_verdict(submission, outcome="reject", hard=True, reason="toploc: other model"))
    assert docket.rejections() == {"toploc": 2}
