"""What a validator makes of beacons and receipts: nobody is excused who cannot be shown to be."""

from __future__ import annotations

import pytest
from factories import (
    make_batch,
    make_draw_evidence,
    make_head,
    make_manifest,
    make_submission,
    make_verdict,
    receipt_of,
)

from node.validator.docket import OpenCase
from node.validator.draws import MAX_HEADS, NEVER_SEEN, Draws
from protocol.draw import prove_undrawn
from protocol.envelope import open_envelope
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Draw, Head

RUN = b"r" * 32
ALICE = Identity.from_phrase("alice")
MANIFEST = make_manifest()


@pytest.fixture
def ledger() -> LedgerState:
    """Alice has eight accepted submissions: her rate is at the floor of a quarter."""
    state = LedgerState(RUN, MANIFEST)
    for step in range(2):
        for index in range(4):
            submission = make_submission(ALICE, RUN, step=step, index=index)
            state.apply(submission.data)
            state.apply(make_verdict(submission).data)
    state.apply(make_batch(RUN, 0, [submission]))
    return state


@pytest.fixture
def draws(ledger: LedgerState) -> Draws:
    known = Draws(ledger)
    known.hear(make_head(RUN, 1, ledger_length=ledger.length))
    return known


def case(number: int = 0, *, receipt_names: int = 1, seen_sequence: int = 1, who: Identity = ALICE) -> OpenCase:
    submission = make_submission(who, RUN, step=5, sha256=bytes([number]) * 32)
    receipt = receipt_of(submission, head_sequence=receipt_names)
    return OpenCase(number, submission, receipt, seen_sequence, (receipt.author,))


def beat(draws: Draws, ledger: LedgerState, sequence: int, **changes: int) -> None:
    draws.hear(make_head(RUN, sequence, **{"ledger_length": ledger.length, **changes}))


def test_case_waits_for_the_first_head_after_its_receipt(draws: Draws, ledger: LedgerState) -> None:
    assert draws.draw(case(), waited_s=1.0) is None
    beat(draws, ledger, 2)
    beat(draws, ledger, 3)
    draw = draws.draw(case(), waited_s=1.0)
    assert draw is not None
    assert draw.rate == 0.25
    assert open_envelope(draw.beacon, Head).record.sequence == 2


def test_every_undrawn_case_can_be_proved_and_a_quarter_is_drawn(draws: Draws, ledger: LedgerState) -> None:
    beat(draws, ledger, 2)
    made = [(one, draws.draw(one, waited_s=0.0)) for one in map(case, range(200))]
    for opened, draw in made:
        assert draw is not None
        if not draw.drawn:
            prove_undrawn(make_verdict(opened.submission, draw=draw).record, MANIFEST, record_at=ledger.record)
    assert 25 <= sum(draw.drawn for _, draw in made if draw) <= 80


def in_full(draw: Draw | None) -> str:
    assert draw is not None
    assert (draw.drawn, draw.rate, draw.beacon) == (True, 1.0, b"")
    return draw.why


def test_newcomer_and_whoever_was_rejected_are_checked_in_full(draws: Draws, ledger: LedgerState) -> None:
    assert in_full(draws.draw(case(who=Identity.from_phrase("bob")), waited_s=0.0)) == "newcomer"
    submission = make_submission(ALICE, RUN, step=2)
    ledger.apply(submission.data)
    ledger.apply(make_verdict(submission, outcome="reject", reason="logprob: off").data)
    assert in_full(draws.draw(case(), waited_s=0.0)) == "rejected before"


def test_submission_that_is_shown_after_its_beacon_is_checked_in_full(draws: Draws, ledger: LedgerState) -> None:
    """A relay holds a submission back until its beacon is known, and shows it only if it is not drawn."""
    beat(draws, ledger, 2)
    assert in_full(draws.draw(case(seen_sequence=2), waited_s=0.0)) == "seen too late for a draw"


def test_receipt_that_is_dated_back_is_checked_in_full(draws: Draws, ledger: LedgerState) -> None:
    """A relay signs for a submission with an old head, whose successor was known when the submission was made."""
    for sequence in (2, 3, 4):
        beat(draws, ledger, sequence)
    assert in_full(draws.draw(case(receipt_names=2, seen_sequence=4), waited_s=0.0)) == "seen too late for a draw"


def test_head_that_was_missed_is_no_reason_to_take_a_later_one(draws: Draws, ledger: LedgerState) -> None:
    beat(draws, ledger, 3)  # and 2 never came here
    assert in_full(draws.draw(case(), waited_s=0.0)) == "seen too late for a draw"


def test_without_any_head_at_sight_nothing_can_be_shown(ledger: LedgerState) -> None:
    """A validator that has just started cannot know what was public before."""
    fresh = Draws(ledger)
    assert fresh.newest_sequence == NEVER_SEEN
    beat(fresh, ledger, 2)
    assert in_full(fresh.draw(case(seen_sequence=NEVER_SEEN), waited_s=0.0)) == "seen too late for a draw"


def test_receipt_from_the_future_is_checked_in_full_in_the_end(draws: Draws, ledger: LedgerState) -> None:
    """A relay names a head that will never be, so that no beacon ever comes."""
    beat(draws, ledger, 2)
    far = case(receipt_names=2**53, seen_sequence=2)
    assert draws.draw(far, waited_s=1.0) is None
    assert in_full(draws.draw(far, waited_s=31.0)) == "no beacon came"


def test_ledger_that_the_beacon_names_is_waited_for(draws: Draws, ledger: LedgerState) -> None:
    beat(draws, ledger, 2, ledger_length=ledger.length + 1)
    assert draws.draw(case(), waited_s=1.0) is None
    assert in_full(draws.draw(case(), waited_s=31.0)) == "the beacon's ledger did not come"
    submission = make_submission(ALICE, RUN, step=2)
    ledger.apply(submission.data)
    draw = draws.draw(case(), waited_s=1.0)
    assert draw is not None
    assert draw.beacon


def test_heads_are_bounded(ledger: LedgerState) -> None:
    draws = Draws(ledger)
    head = make_head(RUN, 1)
    for _ in range(3 * MAX_HEADS):
        draws.hear(head)
    assert len(draws._heads) <= MAX_HEADS


def test_validators_of_a_quorum_draw_alike(ledger: LedgerState, draws: Draws) -> None:
    other = Draws(ledger)
    other.hear(make_head(RUN, 1))
    beat(draws, ledger, 2)
    beat(other, ledger, 2)
    for one in map(case, range(50)):
        assert draws.draw(one, waited_s=0.0) == other.draw(one, waited_s=3.0)
    assert make_draw_evidence(case().submission, make_head(RUN, 2), rate=0.25).receipt
