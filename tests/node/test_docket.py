"""The validator's docket: a case that was opened is judged, whatever happens in between."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from factories import make_submission, make_verdict, receipt_of
from sqlite_kit import counted

from node.validator.docket import MAX_MET, Docket
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.records import Submission

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


def test_counts_and_what_relays_lack_survive_a_restart(tmp_path: Path, docket: Docket) -> None:
    first, second, third = (make_submission(ALICE, RUN, index=index) for index in range(3))
    docket.add(make_verdict(first, outcome="undecided", reason="policy: gone"))
    docket.add(make_verdict(second, outcome="reject", reason="toploc: other model"))
    docket.posted(second.id, RELAY)
    assert [key for key, _ in docket.unposted(RELAY)] == [first.id]
    docket.posted(first.id, RELAY)
    docket.add(make_verdict(first))  # a decision goes to every relay again
    docket.add(make_verdict(third))
    for one in (docket, Docket(tmp_path / "docket.sqlite")):
        assert one.outcomes() == {"accept": 2, "reject": 1}
        assert one.rejections() == {"toploc": 1}
        assert [key for key, _ in one.unposted(RELAY)] == [first.id, third.id]
        assert [key for key, _ in one.unposted(OTHER)] == [first.id, second.id, third.id]


def test_a_file_of_an_earlier_version_tells_what_its_relays_lack(tmp_path: Path, docket: Docket) -> None:
    submissions = [make_submission(ALICE, RUN, index=index) for index in range(3)]
    for one in submissions:
        docket.add(make_verdict(one))
    docket.posted(submissions[1].id, RELAY)
    docket.close()
    with sqlite3.connect(tmp_path / "docket.sqlite") as file:
        file.executescript("DROP TABLE met; DROP TABLE lacking")
    file.close()
    again = Docket(tmp_path / "docket.sqlite")
    assert [key for key, _ in again.unposted(RELAY)] == [submissions[0].id, submissions[2].id]


def test_a_verdict_costs_no_more_after_a_thousand_others(
    docket: Docket,
) -> None:
    """Counted in steps of sqlite's machine, with one relay that refuses a verdict for ever and keeps its queue."""
    submissions = [make_submission(ALICE, RUN, step=number // 8, index=number % 8) for number in range(1100)]
    docket._db._connection.execute("PRAGMA synchronous=OFF")
    docket.add(make_verdict(submissions[0]))
    docket.unposted(RELAY)

    def steps_for(some: Sequence[Signed[Submission]]) -> int:
        with counted(docket._db._connection) as steps:
            for one in some:
                docket.open(one, receipt_of(one), seen_sequence=1)
                docket.add(make_verdict(one))
                docket.unposted(RELAY, 1)
                docket.posted(one.id, RELAY)
                assert docket.outcomes()["accept"]
                assert docket.rejections() == {}
        return steps.taken

    early = steps_for(submissions[1:51])
    steps_for(submissions[51:1050])
    assert steps_for(submissions[1050:1100]) < 1.3 * early


def test_relays_that_are_gone_are_forgotten_and_lack_the_same_when_they_come_back(docket: Docket) -> None:
    """Whoever advertises as a relay under many keys must not leave a row a verdict for each of them."""
    verdicts = [make_verdict(make_submission(ALICE, RUN, index=index)) for index in range(2)]
    for one in verdicts:
        docket.add(one)
    docket.posted(verdicts[0].record.submission, RELAY)
    strangers = [Identity.from_phrase(f"stranger {number}").peer_id for number in range(MAX_MET)]
    for relay in (RELAY, OTHER, *strangers):
        docket.unposted(relay)
    docket.forget_but([OTHER])
    docket.posted(verdicts[1].record.submission, strangers[0])
    assert [key for key, _ in docket.unposted(RELAY)] == [verdicts[1].record.submission]
    assert [key for key, _ in docket.unposted(strangers[0])] == [verdicts[0].record.submission]
    assert docket._db.row("SELECT COUNT(DISTINCT relay) FROM lacking") == (3,)
