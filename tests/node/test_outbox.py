"""The outbox: finished work survives, indices are never used twice, verdicts settle."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import VALIDATOR, make_submission, make_verdict, sealed

from node.inference.outbox import Outbox
from node.verdict_show import find_verdicts
from protocol.envelope import Signed
from protocol.errors import DataDirError
from protocol.identity import Identity
from protocol.records import Receipt, Submission

RUN = b"r" * 32
ALICE = Identity.from_phrase("alice")
RELAY = Identity.from_phrase("relay")


def receipt(submission: Signed[Submission]) -> Signed[Receipt]:
    record = Receipt(run_id=RUN, submission=submission.id, head_sequence=1, received_at_ms=2)
    return sealed(record, RELAY)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox.sqlite")


def test_index_goes_on_after_a_restart(tmp_path: Path, outbox: Outbox) -> None:
    outbox.add(make_submission(ALICE, RUN), tmp_path / "0")
    outbox.add(make_submission(ALICE, RUN, index=1), tmp_path / "1")
    again = Outbox(tmp_path / "outbox.sqlite")
    assert (again.next_index(0), again.next_index(1)) == (2, 0)


def test_one_submission_from_ready_to_accepted(tmp_path: Path, outbox: Outbox) -> None:
    submission = make_submission(ALICE, RUN)
    outbox.add(submission, tmp_path / "0")
    assert [one.id for one in outbox.ready()] == [submission.id]
    outbox.received(submission.id, RELAY.peer_id, receipt(submission))
    assert outbox.ready() == []
    assert [one.id for one in outbox.unjudged()] == [submission.id]
    assert outbox.relay_of(submission.id) == RELAY.peer_id
    assert outbox.judged(make_verdict(submission))
    assert not outbox.judged(make_verdict(submission)), "the same verdict again is no news"
    assert outbox.count("accepted") == 1


def test_reasons_are_counted_by_their_name(tmp_path: Path, outbox: Outbox) -> None:
    first, second = make_submission(ALICE, RUN), make_submission(ALICE, RUN, index=1)
    outbox.add(first, tmp_path / "0")
    outbox.add(second, tmp_path / "1")
    outbox.judged(make_verdict(first, outcome="reject", reason="sampling: margin 3.1"))
    outbox.refused(second.id, "stale-step: too old")
    assert outbox.reasons() == {"sampling": 1, "stale-step": 1}


def test_undecided_can_still_be_accepted(tmp_path: Path, outbox: Outbox) -> None:
    submission = make_submission(ALICE, RUN)
    outbox.add(submission, tmp_path / "0")
    outbox.judged(make_verdict(submission, outcome="undecided", reason="the engine failed"))
    assert outbox.judged(make_verdict(submission, by=VALIDATOR, issued_at_ms=9))
    assert outbox.count("accepted") == 1


def test_files_of_settled_old_steps_are_deleted(tmp_path: Path, outbox: Outbox) -> None:
    settled, waiting = make_submission(ALICE, RUN), make_submission(ALICE, RUN, index=1)
    for number, submission in enumerate((settled, waiting)):
        (tmp_path / str(number)).write_bytes(b"rollouts")
        outbox.add(submission, tmp_path / str(number))
    outbox.judged(make_verdict(settled))
    outbox.discard_files(1)
    assert not (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_every_validators_verdict_is_kept_for_its_submission_alone(tmp_path: Path, outbox: Outbox) -> None:
    submission = make_submission(ALICE, RUN)
    outbox.add(submission, tmp_path / "0")
    kept = [make_verdict(submission, by=Identity.from_phrase(name)) for name in ("v1", "v2")]
    for verdict in (*kept, make_verdict(make_submission(Identity.from_phrase("bob"), RUN))):
        outbox.judged(verdict)
    found = [one.verdict.data for one in find_verdicts(submission.id.hex(), tmp_path)]
    assert found == [verdict.data for verdict in kept]
    assert find_verdicts("last", tmp_path)[0].verdict.record.submission == submission.id


def test_verdict_about_anothers_submission_is_no_news(outbox: Outbox) -> None:
    assert not outbox.judged(make_verdict(make_submission(Identity.from_phrase("bob"), RUN)))


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "outbox.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataDirError, match="outbox"):
        Outbox(tmp_path / "outbox.sqlite")
