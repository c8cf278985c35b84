"""Appeals at a validator: which it answers, with which case, and what becomes of the case."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import (
    OPERATOR,
    VALIDATOR,
    make_answer,
    make_appeal,
    make_head,
    make_manifest,
    make_submission,
    make_verdict,
    receipt_of,
    sealed,
)

from node.validator.appeals import AppealCases
from node.validator.bench import REPLACE_HEADS
from node.validator.cases import Case
from node.validator.docket import Docket
from node.validator.draws import Draws
from node.validator.policy_fault import policy_fault
from protocol.identity import Identity, PeerId
from protocol.ledger import LedgerState

ALICE, CARL, DAVE, EVE, FAY = (Identity.from_phrase(name) for name in ("alice", "carl", "dave", "eve", "fay"))
JUDGES = (VALIDATOR, CARL, DAVE, EVE, FAY)
MANIFEST = sealed(make_manifest(validators=tuple(one.peer_id.public_key for one in JUDGES), quorum=2), OPERATOR)
RELAY = Identity.from_phrase("relay").peer_id


class Court:
    """A ledger in which VALIDATOR and CARL have rejected a submission whose author appeals; the others look on."""

    def __init__(self, tmp_path: Path) -> None:
        self.state = LedgerState(MANIFEST.id, MANIFEST.record)
        self.draws = Draws(self.state)
        self.beat(1)
        self.work = make_submission(ALICE, MANIFEST.id)
        self.rejections = [make_verdict(self.work, by=by, outcome="reject", hard=True) for by in (VALIDATOR, CARL)]
        self.appeal = make_appeal(ALICE, self.rejections[0])
        for entry in (self.work, *self.rejections, self.appeal):
            self.state.apply(entry.data)
        self.dockets = {one: Docket(tmp_path / f"{number}.sqlite") for number, one in enumerate(JUDGES)}
        for one, docket in self.dockets.items():
            docket.open(self.work, receipt_of(self.work), seen_sequence=1)
            rejected = [verdict for verdict in self.rejections if verdict.author == one.peer_id]
            docket.add(rejected[0]) if rejected else docket.dismiss(self.work.id)
        self.desks = {
            one: AppealCases(one.peer_id, self.state, docket, self.draws) for one, docket in self.dockets.items()
        }

        self.cases: dict[Identity, Case] = {}

    def beat(self, *sequences: int) -> None:
        for sequence in sequences:
            self.draws.hear(make_head(MANIFEST.id, sequence, previous_sequence=sequence - 1))

    def called(self) -> list[Identity]:
        return [one for one, desk in self.desks.items() if self.startable(one)]

    def say(self, by: Identity, outcome: str = "accept") -> None:
        """An answer that comes into the ledger."""
        answer = make_answer(self.work, self.appeal, by=by, outcome=outcome, reason="")
        self.dockets[by].add(answer)
        self.desks[by].closed(self.cases[by])
        self.state.apply(answer.data)

    def startable(self, one: Identity, relays: tuple[PeerId, ...] = (RELAY,)) -> bool:
        for case in self.desks[one].startable(relays):
            case.busy = False
            self.cases[one] = case
            assert (case.appeal, case.submission.id) == (self.appeal.id, self.work.id)
            assert case.draw is not None
            assert case.draw.drawn
            assert list(case.relays) == [RELAY]
            return True
        return False


def test_as_many_are_called_as_must_agree_and_another_for_who_is_absent(tmp_path: Path) -> None:
    court = Court(tmp_path)
    first = court.called()
    assert len(first) == 2
    assert set(first) < {DAVE, EVE, FAY}
    court.beat(*range(2, 2 + REPLACE_HEADS))  # one that was called is switched off
    assert set(court.called()) == {DAVE, EVE, FAY}


def stand_by(court: Court) -> tuple[Identity, Identity, Identity]:
    """The two that are called, and the one that stands by."""
    first, second = court.called()
    (third,) = {DAVE, EVE, FAY} - {first, second}
    return first, second, third


def test_the_second_stays_when_the_first_has_answered(tmp_path: Path) -> None:
    court = Court(tmp_path)
    first, second, _ = stand_by(court)
    court.say(first)
    assert court.called() == [second]
    court.say(second)
    assert court.called() == []


@pytest.mark.parametrize("outcomes", [("accept", "reject"), ("reject", "accept"), ("undecided", "accept")], ids=str)
def test_answers_that_do_not_agree_call_another(tmp_path: Path, outcomes: tuple[str, str]) -> None:
    """At once, without waiting for heads."""
    court = Court(tmp_path)
    first, second, third = stand_by(court)
    court.say(first, outcomes[0])
    court.say(second, outcomes[1])
    assert court.called() == [third]
    court.say(third, outcomes[1])
    assert court.called() == []


def test_a_case_is_given_out_once_and_never_after_its_answer(tmp_path: Path) -> None:
    court = Court(tmp_path)
    judge, other = court.called()
    desk, docket = court.desks[judge], court.dockets[judge]
    (case,) = desk.startable([RELAY])
    assert list(desk.startable([RELAY])) == []
    answer = make_answer(court.work, court.appeal, by=judge)
    docket.add(answer)
    desk.closed(case)
    assert list(desk.startable([RELAY])) == []
    assert docket.unposted(RELAY)[-1] == (court.appeal.id, answer.data)
    court.state.apply(answer.data)
    assert court.called() == [other]


def test_who_judged_too_late_for_the_ledger_may_answer_still(tmp_path: Path) -> None:
    """Its first verdict counts nowhere; its docket holds both."""
    court = Court(tmp_path)
    judge, other = court.called()
    docket = court.dockets[judge]
    docket.add(make_verdict(court.work, by=judge))
    assert court.called() == [judge, other]
    docket.add(make_answer(court.work, court.appeal, by=judge))
    assert len(docket.unposted(RELAY)) == 2


def test_who_never_saw_the_submission_leaves_it_to_others(tmp_path: Path) -> None:
    court = Court(tmp_path)
    judge, _ = court.called()
    fresh = AppealCases(judge.peer_id, court.state, Docket(tmp_path / "fresh.sqlite"), court.draws)
    assert list(fresh.startable([RELAY])) == []


@pytest.mark.parametrize("is_appeal", [True, False])
def test_old_policy_is_looked_for_on_appeal_only(tmp_path: Path, is_appeal: bool) -> None:
    court = Court(tmp_path)
    judge, _ = court.called()
    (case,) = court.desks[judge].startable([RELAY])
    if not is_appeal:
        case.appeal = b""
    fault = policy_fault(case, court.state, held=None, oldest=9)
    assert (fault is None) == is_appeal
