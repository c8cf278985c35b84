"""The outbox: finished work survives, indices are never used twice, verdicts settle."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from factories import VALIDATOR, make_batch, make_submission, make_trained, make_verdict, receipt_of, sealed
from sqlite_kit import counted

from node.inference.outbox import Outbox
from node.receipts import kept_receipts, summary
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


def test_nothing_follows_a_refused_submission_of_its_step(tmp_path: Path, outbox: Outbox) -> None:
    """The ledger takes a step's submissions by index: what were accepted behind a gap would wait there for ever."""
    taken, late, behind, made_later = (make_submission(ALICE, RUN, index=index) for index in range(4))
    other = make_submission(ALICE, RUN, step=1, checkpoint_step=1)
    for number, one in enumerate((taken, late, behind, other)):
        outbox.add(one, tmp_path / str(number))
    outbox.received(taken.id, RELAY.peer_id, receipt(taken))
    assert outbox.refused(late.id, "stale-step: too old")
    assert outbox.has_refused(0)
    assert not outbox.has_refused(1)
    outbox.add(made_later, tmp_path / "later")
    assert [one.id for one in outbox.ready()] == [other.id]
    assert not outbox.is_ready(behind.id)
    assert outbox.reasons() == {"stale-step": 1, "after-refused": 2}


def test_one_relay_s_refusal_does_not_undo_another_s_receipt(tmp_path: Path, outbox: Outbox) -> None:
    """It was offered to a second relay because nobody had judged it yet; the first still has it."""
    submission = make_submission(ALICE, RUN)
    outbox.add(submission, tmp_path / "0")
    outbox.received(submission.id, RELAY.peer_id, receipt(submission))
    assert not outbox.refused(submission.id, "stale-step: too old")
    assert outbox.judged(make_verdict(submission))


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


def work_of(outbox: Outbox, submissions: Sequence[Signed[Submission]], directory: Path) -> int:
    """Steps of sqlite's machine for all that a node does about these, each from its making until it was trained."""
    with counted(outbox._db._connection) as steps:
        for number, one in enumerate(submissions):
            step = one.record.step
            assert not outbox.has_refused(step)
            outbox.add(one, directory / one.id.hex())
            if number % 10 == 0:
                outbox.refused(one.id, "stale-step: too old")
                continue
            outbox.received(one.id, RELAY.peer_id, receipt(one))
            outbox.judged(make_verdict(one))
            outbox.discard_files(step)
            assert outbox.count("ready", "received", "undecided") == 0
            assert (outbox.count("accepted") > 0, outbox.accepted_tokens() > 0) == (True, True)
            assert set(outbox.reasons()) == {"stale-step"}
            assert outbox.unproved(8) == [one.id]
            outbox.keep_step(step, b"batch", b"trained", [one.id])
    return steps.taken


def test_work_for_a_submission_does_not_grow_with_those_before(tmp_path: Path, outbox: Outbox) -> None:
    outbox._db._connection.execute("PRAGMA synchronous=OFF")
    submissions = [make_submission(ALICE, RUN, step=number) for number in range(240)]
    early = work_of(outbox, submissions[:20], tmp_path)
    work_of(outbox, submissions[20:220], tmp_path)
    assert work_of(outbox, submissions[220:], tmp_path) < 1.3 * early


def test_file_of_an_earlier_release_is_counted_when_it_is_opened(tmp_path: Path, outbox: Outbox) -> None:
    submissions = [make_submission(ALICE, RUN, step=number) for number in range(5)]
    for one in submissions:
        outbox.add(one, tmp_path / "file")
    for one in submissions[:3]:
        outbox.judged(make_verdict(one))
    outbox.judged(make_verdict(submissions[3], outcome="reject", reason="sampling: margin 3.1"))
    outbox.keep_step(0, b"batch", b"trained", [submissions[0].id])
    outbox.keep_step(1, b"batch", b"", [submissions[1].id])
    outbox.close()
    with closing(sqlite3.connect(outbox.path)) as file, file:
        for what in ("TRIGGER made", "TRIGGER moved", "TRIGGER accepted", "TABLE counts", "TABLE unproved"):
            file.execute(f"DROP {what}")
    for again in (Outbox(outbox.path), Outbox(outbox.path)):  # as it was found, and once more
        assert (again.count("accepted"), again.count("ready"), again.reasons()) == (3, 1, {"sampling": 1})
        assert again.accepted_tokens() == sum(one.record.output_tokens for one in submissions[:3])
        assert again.unproved(9) == [submissions[2].id, submissions[1].id]
    assert again.judged(make_verdict(submissions[4]))
    assert (again.count("accepted"), again.count("ready"), again.unproved(1)) == (4, 0, [submissions[4].id])


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


# Several validators, appeals, and what proves use.

CARL, DAVE = Identity.from_phrase("carl"), Identity.from_phrase("dave")


def hand_in(outbox: Outbox, tmp_path: Path, index: int = 0) -> Any:
    submission = make_submission(ALICE, RUN, index=index)
    outbox.add(submission, tmp_path / "file")
    return submission


def test_one_verdict_of_two_settles_nothing(tmp_path: Path) -> None:
    """A dishonest validator is the first to speak."""
    outbox = Outbox(tmp_path / "outbox.sqlite", quorum=2)
    work = hand_in(outbox, tmp_path)
    assert not outbox.judged(make_verdict(work, outcome="reject", hard=True, reason="seed: made up"))
    assert not outbox.judged(make_verdict(work, by=CARL))
    assert outbox.judged(make_verdict(work, by=DAVE))
    assert (outbox.count("accepted"), outbox.count("rejected")) == (1, 0)
    assert len(outbox.verdicts(work.id)) == 3


def test_answer_to_an_appeal_overturns_a_rejection(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    work = hand_in(outbox, tmp_path)
    rejection = make_verdict(work, outcome="reject", reason="toploc: off")
    outbox.judged(rejection)
    assert [one.id for one in outbox.rejections(9)] == [rejection.id]
    assert outbox.judged(make_verdict(work, by=CARL, appeal=b"a" * 32))
    assert outbox.count("accepted") == 1
    assert outbox.rejections(9) == []


@pytest.mark.parametrize("outcome", ["reject", "undecided", "accept"])
def test_answer_to_no_appeal_of_ours_hides_no_rejection(tmp_path: Path, outcome: str) -> None:
    """A validator names an appeal that does not exist, after it judged, or without: the rejection stays appealable."""
    outbox = Outbox(tmp_path / "outbox.sqlite", quorum=2, validators=5)
    work = hand_in(outbox, tmp_path)
    first, second = (make_verdict(work, by=by, outcome="reject", reason="seed: x") for by in (CARL, DAVE))
    assert [outbox.judged(one) for one in (first, second)] == [False, True]
    for number, by in enumerate((CARL, DAVE, VALIDATOR, CARL, DAVE, VALIDATOR)):
        assert not outbox.judged(make_verdict(work, by=by, outcome=outcome, reason="x", appeal=bytes([number] * 32)))
    assert [one.id for one in outbox.rejections(9)] == [second.id, first.id]
    assert outbox.count("rejected") == 1
    assert len(outbox.verdicts(work.id)) == 5, "one answer of each is kept"


def test_answers_to_appeals_settle_no_submission(tmp_path: Path) -> None:
    """Validators that never judged reject in answer to an appeal that does not exist."""
    outbox = Outbox(tmp_path / "outbox.sqlite", quorum=2, validators=5)
    work = hand_in(outbox, tmp_path)
    for by in (CARL, DAVE, VALIDATOR):
        assert not outbox.judged(make_verdict(work, by=by, outcome="reject", reason="x", appeal=b"a" * 32))
    assert outbox.count("rejected") == 0


@pytest.mark.parametrize(("validators", "accepts", "needed"), [(5, 0, 2), (4, 1, 1), (3, 0, 1)])
def test_as_many_answers_overturn_a_rejection_as_judge(
    tmp_path: Path, validators: int, accepts: int, needed: int
) -> None:
    """A dishonest validator grants an appeal that the ledger does not; or all who are left do."""
    outbox = Outbox(tmp_path / "outbox.sqlite", quorum=2, validators=validators)
    work = hand_in(outbox, tmp_path)
    for judge in ("erin", "frank", "grace")[: 2 + accepts]:
        outcome = "accept" if judge == "grace" else "reject"
        outbox.judged(make_verdict(work, by=Identity.from_phrase(judge), outcome=outcome))
    answers = [make_verdict(work, by=one, appeal=b"a" * 32) for one in (CARL, DAVE)]
    assert [outbox.judged(one) for one in answers[:needed]] == [False] * (needed - 1) + [True]
    assert outbox.count("accepted") == 1


def test_receipts_of_every_station_are_kept_and_shown(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    first, second = hand_in(outbox, tmp_path), hand_in(outbox, tmp_path, 1)
    outbox.received(first.id, RELAY.peer_id, receipt_of(first))
    for work in (first, second):
        outbox.judged(make_verdict(work))
    assert outbox.unproved(9) == [second.id, first.id]
    batch = make_batch(RUN, 0, [first])
    outbox.keep_step(0, batch, b"", [first.id])
    assert outbox.unproved(9) == [second.id, first.id]  # not yet trained
    outbox.keep_step(0, batch, make_trained(RUN, 0), [first.id])
    assert outbox.unproved(9) == [second.id]
    row, other = kept_receipts(tmp_path)
    assert (row["relay"], row["validators"]) == (str(RELAY.peer_id), [str(VALIDATOR.peer_id)])
    assert (row["used_in"], row["trained"]) == (0, True)
    assert (other["relay"], other["used_in"], other["trained"]) == ("", None, False)
    assert "1 receipts of relays, 2 verdicts, 1 places in batches, of which 1 were trained" in summary([row, other])


def test_batch_that_does_not_name_the_work_proves_nothing(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    work = hand_in(outbox, tmp_path)
    outbox.judged(make_verdict(work))
    outbox.keep_step(0, make_batch(RUN, 0, [make_submission(CARL, RUN)]), make_trained(RUN, 0), [work.id])
    assert kept_receipts(tmp_path)[0]["used_in"] is None
