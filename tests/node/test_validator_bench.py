"""Who judges what: m of n by the beacon, and who stands in for whom."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from factories import OPERATOR, VALIDATOR, make_head, make_manifest, make_submission, make_verdict, receipt_of, sealed

from node.validator.bench import REPLACE_HEADS, Bench, judging_kinds
from node.validator.docket import OpenCase
from node.validator.draws import PATIENCE_S, Draws
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Draw, Head, Submission

ALICE = Identity.from_phrase("alice")
JUDGES = [VALIDATOR, *(Identity.from_phrase(f"judge {number}") for number in range(4))]


class Court:
    """All benches of a run, who hear the same heads and the same verdicts."""

    def __init__(self, *, quorum: int, judges: int) -> None:
        self.members = JUDGES[:judges]
        keys = tuple(one.peer_id.public_key for one in self.members)
        self.manifest = sealed(make_manifest(validators=keys, quorum=quorum), OPERATOR)
        state = LedgerState(self.manifest.id, self.manifest.record)
        self.draws = Draws(state)
        self.benches = {one: Bench(one.peer_id, state, self.draws) for one in self.members}
        self._sequence = count(2)
        self._index = count()

    def beat(self, times: int = 1) -> None:
        for sequence in (next(self._sequence) for _ in range(times)):
            head: Signed[Head] = make_head(self.manifest.id, sequence, previous_sequence=sequence - 1)
            self.draws.hear(head)

    def case(self) -> OpenCase:
        submission: Signed[Submission] = make_submission(ALICE, self.manifest.id, index=next(self._index))
        return OpenCase(1, submission, receipt_of(submission), 1, ())

    def turns(self, case: OpenCase, *, waited_s: float = 0.0) -> dict[Identity, str]:
        return {one: bench.turn(case, waited_s=waited_s) for one, bench in self.benches.items()}

    def called(self, case: OpenCase) -> list[Identity]:
        return [one for one, turn in self.turns(case).items() if turn == "now"]

    def say(self, case: OpenCase, by: Identity, outcome: str, **changes: Any) -> None:
        for bench in self.benches.values():
            bench.heard(make_verdict(case.submission, by=by, outcome=outcome, **changes))


def test_the_beacon_calls_as_many_as_the_quorum() -> None:
    court = Court(quorum=2, judges=5)
    cases = [court.case() for _ in range(20)]
    assert all(set(court.turns(case).values()) == {"later"} for case in cases)
    court.beat()
    calls = [court.called(case) for case in cases]
    assert {len(call) for call in calls} == {2}
    assert {one for call in calls for one in call} == set(court.members)  # by lot: everybody has work


def test_where_all_must_agree_nobody_waits_for_a_beacon() -> None:
    court = Court(quorum=2, judges=2)
    assert set(court.turns(court.case()).values()) == {"now"}
    assert judging_kinds(court.manifest.record) == ["submission"]


def test_two_who_disagree_call_a_third() -> None:
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    first, second = court.called(case)
    court.say(case, first, "accept")
    assert len(court.called(case)) == 2
    court.say(case, second, "reject", hard=True)
    assert len(court.called(case)) == 3


def test_who_could_not_tell_is_replaced() -> None:
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    first, second = court.called(case)
    court.say(case, first, "undecided")
    court.say(case, second, "accept")
    (third,) = set(court.called(case)) - {first, second}
    court.say(case, third, "accept")
    assert {court.turns(case)[one] for one in court.members if one not in (first, second, third)} == {"never"}


def test_who_is_absent_is_replaced_after_some_heads() -> None:
    """A validator that was switched off, or that sits on its verdict."""
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    assert len(court.called(case)) == 2
    court.beat(REPLACE_HEADS)
    assert len(court.called(case)) == 3
    court.beat(REPLACE_HEADS)
    assert len(court.called(case)) == 4


def test_settled_cases_are_given_up_by_those_who_stand_by() -> None:
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    judges = court.called(case)
    for one in judges:
        court.say(case, one, "reject")
    assert [court.turns(case)[one] for one in court.members if one not in judges] == ["never", "never"]


@pytest.mark.parametrize("lie", [{"contributor": b"x" * 32}, {"step": 7}], ids=["contributor", "step"])
def test_verdict_that_no_ledger_counts_sends_nobody_home(lie: dict[str, Any]) -> None:
    """A validator names another contributor or step: if others took that for a vote, the submission would stay open."""
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    first, second = court.called(case)
    court.say(case, first, "accept", **lie)
    court.say(case, second, "accept")
    assert "never" not in court.turns(case).values()
    court.beat(REPLACE_HEADS)
    assert len(court.called(case)) == 3


def test_excuse_from_the_costly_checks_holds_once_the_ledger_has_it() -> None:
    """A validator accepts unchecked, with evidence that excuses nothing."""
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    lazy = Draw(drawn=False, rate=0.25, why="not drawn", beacon=b"", receipt=b"")
    judges = court.called(case)
    for one in judges:
        court.say(case, one, "accept", draw=lazy)
    others = [one for one in court.members if one not in judges]
    assert [court.turns(case)[one] for one in others] == ["later", "later"]
    court.beat(REPLACE_HEADS)
    assert [court.turns(case)[one] for one in others].count("now") == 1


def test_verdicts_may_come_into_the_ledger_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread extends the ledger, and a verdict takes the place of an earlier one of the same validator."""
    court = Court(quorum=2, judges=4)
    court.beat()
    case = court.case()
    verdicts: dict[Any, Any] = {}

    class Replacing:
        author = JUDGES[1].peer_id

        @property
        def record(self) -> Any:
            verdicts[JUDGES[2].peer_id] = self
            return SimpleNamespace(outcome="accept")

    verdicts[JUDGES[1].peer_id] = Replacing()
    monkeypatch.setattr("node.validator.bench.looked_at", lambda *_: SimpleNamespace(verdicts=verdicts))
    assert "never" not in court.turns(case).values()
    assert len(verdicts) == 2


@pytest.mark.parametrize("reason", ["no beacon", "missed"])
def test_who_cannot_know_judges(reason: str) -> None:
    """A relay that holds heads back, or a validator that slept: more judging is never wrong."""
    court = Court(quorum=2, judges=4)
    if reason == "missed":
        next(court._sequence)
        court.beat()
        assert set(court.turns(court.case()).values()) == {"now"}
    else:
        assert set(court.turns(court.case(), waited_s=PATIENCE_S + 1).values()) == {"now"}
