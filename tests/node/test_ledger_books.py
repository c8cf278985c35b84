"""The audit's own books: what the rules make of votes and credits is not believed, but counted again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from factories import (
    OPERATOR,
    make_answer,
    make_appeal,
    make_eviction,
    make_manifest,
    make_reinstatement,
    make_submission,
    make_verdict,
    sealed,
)

from node.ledger.audit import Audit
from node.ledger.signatures import Checked
from protocol.appeals import Appeals, Tally
from protocol.identity import Identity
from protocol.ledger import LedgerState, open_entry
from protocol.ledger_memory import LedgerSubmission
from protocol.records import Verdict

ALICE = Identity.from_phrase("alice")
JUDGES = [Identity.from_phrase(name) for name in ("erin", "frank", "grace")]
MANIFEST = sealed(make_manifest(validators=tuple(one.peer_id.public_key for one in JUDGES), quorum=2), OPERATOR)
RUN = MANIFEST.id


def audit_of(entries: Sequence[bytes]) -> Audit:
    audit = Audit(MANIFEST)
    for number, data in enumerate(entries):
        audit.take(Checked(number, data, open_entry(data), None))
    return audit


def breaches(audit: Audit) -> list[tuple[str, int | None]]:
    audit.finish()
    return [(one.kind, one.entry) for one in audit.breaches.found]


def one_vote() -> list[bytes]:
    work = make_submission(ALICE, RUN)
    return [work.data, make_verdict(work, by=JUDGES[0]).data]


def judged() -> list[bytes]:
    """Accepts that were first undecided; a hard rejection, the eviction, the appeal and the return."""
    good, bad = (make_submission(ALICE, RUN, index=index) for index in (0, 1))
    outcomes = ["undecided", "accept"]
    entries = [good.data, *(make_verdict(good, by=JUDGES[0], outcome=one).data for one in outcomes)]
    entries += [make_verdict(good, by=JUDGES[1]).data, bad.data]
    hard = [make_verdict(bad, by=one, outcome="reject", hard=True, reason="toploc: x") for one in JUDGES[:2]]
    appeal = make_appeal(ALICE, hard[0])
    answer = make_answer(bad, appeal, by=JUDGES[2])
    entries += [*(one.data for one in hard), make_eviction(hard[0]), appeal.data, answer.data]
    return [*entries, make_reinstatement(answer, appeal).data]


def test_books_agree_with_the_rules() -> None:
    audit = audit_of(judged())
    assert breaches(audit) == []
    assert audit.state.contributors[ALICE.peer_id].credits == 80


FIVE = [*JUDGES, *(Identity.from_phrase(name) for name in ("heidi", "ivan"))]


def court(first: Sequence[tuple[int, str]], answers: Sequence[tuple[int, str]], *, validators: int) -> Audit:
    """What so many validators judged, and then answered; by number of the validator."""
    keys = tuple(one.peer_id.public_key for one in FIVE[:validators])
    run = sealed(make_manifest(validators=keys, quorum=2), OPERATOR)
    work = make_submission(ALICE, run.id)
    verdicts = [make_verdict(work, by=FIVE[judge], outcome=said) for judge, said in first]
    appeal = make_appeal(ALICE, next(one for one in verdicts if one.record.outcome == "reject"))
    answered = [make_answer(work, appeal, by=FIVE[judge], outcome=said) for judge, said in answers]
    audit = Audit(run)
    for number, entry in enumerate([work, *verdicts, appeal, *answered]):
        audit.take(Checked(number, entry.data, entry, None))
    return audit


REJECTED = [(0, "reject"), (1, "reject")]


@pytest.mark.parametrize(
    ("first", "answers", "validators", "earned"),
    [
        (REJECTED, [(2, "reject"), (3, "accept"), (4, "accept")], 5, 40),
        (REJECTED, [(2, "accept"), (3, "reject"), (4, "reject")], 5, 0),
        ([(0, "accept"), (1, "reject"), (2, "reject")], [(3, "accept")], 4, 40),
        ([(0, "accept"), (1, "reject"), (2, "reject")], [(3, "accept")], 5, 0),
        (REJECTED, [(2, "undecided"), (3, "accept"), (2, "accept")], 5, 40),
    ],
    ids=["granted", "refused", "one-left", "two-left", "unsure-first"],
)
def test_books_count_answers_as_the_rules_do(
    first: list[tuple[int, str]], answers: list[tuple[int, str]], validators: int, earned: int
) -> None:
    audit = court(first, answers, validators=validators)
    assert breaches(audit) == []
    assert audit.state.contributors[ALICE.peer_id].credits == earned


def test_books_take_one_answer_of_two_for_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of a node that was tampered with let a liar grant a friend's appeal alone."""
    monkeypatch.setattr(Appeals, "tally", lambda *_: Tally(needed=1, accepts=1, rejects=0, left=1))
    assert breaches(court(REJECTED, [(2, "accept")], validators=5)) == [("quorum", 4), ("balance", None)]


def credit_early(state: LedgerState, submission: LedgerSubmission, latest: Verdict) -> None:
    """Rules of a node that was tampered with: one vote is enough."""
    submission.state = "accepted"
    state.shelf.put(latest.submission)
    state._pay(submission)


def credit_never(state: LedgerState, submission: LedgerSubmission, latest: Verdict) -> None:
    """And that no votes are."""


@pytest.mark.parametrize(
    ("entries", "count", "found"),
    [
        (one_vote(), credit_early, [("quorum", 1), ("balance", None)]),
        (judged()[:4], credit_never, [("quorum", 3), ("balance", None)]),
    ],
    ids=["early", "never"],
)
def test_books_count_votes_themselves(
    monkeypatch: pytest.MonkeyPatch,
    entries: list[bytes],
    count: Callable[[LedgerState, LedgerSubmission, Verdict], None],
    found: list[tuple[str, int | None]],
) -> None:
    """The books take nothing over from the state that they audit."""
    monkeypatch.setattr(LedgerState, "_count", count)
    assert breaches(audit_of(entries)) == found


def test_who_the_rules_forgot_is_missed() -> None:
    """All balances that are there agree, and one is not there."""
    audit = audit_of(judged())
    del audit.state.contributors[ALICE.peer_id]
    audit.finish()
    assert [(one.kind, one.what) for one in audit.breaches.found] == [
        ("balance", "80 credits were earned; they do not add up")
    ]
