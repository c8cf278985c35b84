"""The draw: nobody can foresee it, everybody can make it again."""

from __future__ import annotations

import math

import pytest
from factories import (
    OPERATOR,
    RELAY,
    VALIDATOR,
    make_draw_evidence,
    make_head,
    make_manifest,
    make_submission,
    make_verdict,
    receipt_of,
    sealed,
)
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.draw import TrackRecord, beacon_of, check_rate, is_drawn, is_first_after, prove_undrawn
from protocol.envelope import Signed
from protocol.errors import ProtocolError
from protocol.identity import Identity
from protocol.records import Draw, Head, Manifest, Verdict

ALICE, MALLORY = Identity.from_phrase("alice"), Identity.from_phrase("mallory")
MANIFEST: Signed[Manifest] = sealed(make_manifest(), OPERATOR)
RUN = MANIFEST.id
SPEC = MANIFEST.record.checks  # two newcomer submissions, a floor of a quarter
GOOD = TrackRecord(accepted=50, streak=50)


def veteran(peer, length):
    return GOOD


def undrawn(beacon: Signed[Head], **changes) -> tuple[Signed[Verdict], Signed[Head]]:
    """An accepting verdict without the costly checks, about a submission that this beacon does not draw."""
    for index in range(64):
        submission = make_submission(ALICE, RUN, index=index)
        if not is_drawn(beacon_of(beacon), submission.id, rate=0.25):
            draw = make_draw_evidence(submission, beacon, rate=0.25)
            return make_verdict(submission, draw=replace(draw, **changes)), beacon
    raise AssertionError("64 draws in a row")


def prove(verdict: Signed[Verdict], record_at=veteran) -> None:
    prove_undrawn(verdict.record, MANIFEST.record, record_at=record_at)


@pytest.mark.parametrize(
    ("record", "rate"),
    [
        (TrackRecord(), 1.0),
        (TrackRecord(accepted=1, streak=1), 1.0),
        (TrackRecord(accepted=2, streak=2), 1.0),
        (TrackRecord(accepted=4, streak=4), 0.5),
        (TrackRecord(accepted=8, streak=8), 0.25),
        (TrackRecord(accepted=10**6, streak=10**6), 0.25),
        (TrackRecord(accepted=500, rejected=1, streak=0), 1.0),
        (TrackRecord(accepted=500, rejected=1, streak=2), 1.0),
        (TrackRecord(accepted=504, rejected=1, streak=4), 0.5),
    ],
)
def test_rate_falls_with_the_record_to_the_floor_and_is_full_again_after_a_rejection(record, rate):
    assert check_rate(record, SPEC) == rate


@given(st.integers(0, 2**53), st.floats(0.001, 1.0), st.integers(1, 2**53))
def test_rate_is_never_zero(streak, floor, newcomer):
    spec = replace(SPEC, floor=floor, newcomer_submissions=newcomer)
    assert floor <= check_rate(TrackRecord(accepted=streak, streak=streak), spec) <= 1.0


def test_golden_draw():
    """A change here is another protocol version: validators would draw differently."""
    head = make_head(RUN, 7)
    assert beacon_of(head) == beacon_of(make_head(RUN, 7))
    assert [is_drawn(b"b" * 32, bytes([n]) * 32, rate=0.25) for n in range(12)] == [
        bool(int(bit)) for bit in "010001000000"
    ]


def test_draws_follow_the_rate_and_do_not_depend_on_each_other():
    ids = [n.to_bytes(32, "big") for n in range(4000)]
    first, second = ([is_drawn(beacon, key, rate=0.25) for key in ids] for beacon in (b"1" * 32, b"2" * 32))
    spread = 5 * math.sqrt(0.25 * 0.75 / len(ids))
    assert abs(sum(first) / len(ids) - 0.25) < spread
    assert abs(sum(map(min, first, second)) / len(ids) - 0.0625) < spread
    assert all(is_drawn(b"1" * 32, key, rate=1.0) for key in ids)


def test_who_guesses_all_that_a_head_says_does_not_know_its_beacon():
    """A contributor predicts the next head to the millisecond and picks a submission that it does not draw."""
    true = make_head(RUN, 9)
    guessed = sealed(true.record, MALLORY)
    assert guessed.record == true.record
    assert beacon_of(guessed) != beacon_of(true)


@pytest.mark.parametrize(("previous", "sequence", "first"), [(5, 6, True), (4, 9, True), (6, 7, False), (3, 5, False)])
def test_first_head_after_a_receipt(previous, sequence, first):
    receipt = receipt_of(make_submission(ALICE, RUN), head_sequence=5)
    head = make_head(RUN, sequence, previous_sequence=previous)
    assert is_first_after(head.record, receipt.record) is first


def test_undrawn_verdict_proves_itself():
    prove(undrawn(make_head(RUN, 2))[0])


def test_verdict_without_evidence_is_refused():
    """A validator skips the costly checks and says nothing of a beacon."""
    submission = make_submission(ALICE, RUN)
    draw = Draw(drawn=False, rate=0.25, why="trust me", beacon=b"", receipt=b"")
    with pytest.raises(ProtocolError):
        prove(make_verdict(submission, draw=draw))


def test_drawn_submission_cannot_pass_as_undrawn():
    beacon = make_head(RUN, 2)
    submissions = (make_submission(ALICE, RUN, index=index) for index in range(64))
    drawn = next(one for one in submissions if is_drawn(beacon_of(beacon), one.id, rate=0.25))
    with pytest.raises(ProtocolError, match="draws this submission"):
        prove(make_verdict(drawn, draw=make_draw_evidence(drawn, beacon, rate=0.25)))


def test_beacon_must_be_the_first_head_after_the_receipt():
    """A validator picks, among many later heads, one that does not draw."""
    with pytest.raises(ProtocolError, match="first head"):
        prove(undrawn(make_head(RUN, 9, previous_sequence=8))[0])


def test_beacon_must_be_the_trainers():
    with pytest.raises(ProtocolError, match="head signed by"):
        prove(undrawn(make_head(RUN, 2, by=VALIDATOR))[0])


def test_evidence_must_be_of_this_run_and_submission():
    beacon = make_head(b"x" * 32, 2)
    with pytest.raises(ProtocolError, match="another run"):
        prove(undrawn(beacon)[0])
    other = receipt_of(make_submission(ALICE, RUN, step=2))
    with pytest.raises(ProtocolError, match="another submission"):
        prove(undrawn(make_head(RUN, 2), receipt=other.data)[0])


def test_rate_is_the_ledgers_not_the_validators():
    """A validator claims a lower rate than the contributor's record gives."""
    verdict, _ = undrawn(make_head(RUN, 2))
    with pytest.raises(ProtocolError, match="rate"):
        prove(verdict, lambda peer, length: TrackRecord(accepted=4, streak=4))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_evidence_gives_a_protocol_error(beacon, receipt):
    draw = Draw(drawn=False, rate=0.25, why="", beacon=beacon, receipt=receipt)
    with pytest.raises(ProtocolError):
        prove(make_verdict(make_submission(ALICE, RUN), draw=draw))


def test_receipt_of_any_relay_will_do():
    """Relays are not trusted: that a receipt is early enough is the validators' business."""
    verdict, beacon = undrawn(make_head(RUN, 2))
    assert make_draw_evidence(make_submission(ALICE, RUN), beacon, rate=1.0).receipt
    assert RELAY.peer_id not in MANIFEST.record.validator_ids
    prove(verdict)
