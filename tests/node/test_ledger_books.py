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


def credit_early(state: LedgerState, submission: LedgerSubmission, latest: Verdict) -> None:
    """Rules of a node that was tampered with: one vote is enough."""
    submission.state = "accepted"
    state._waiting[latest.submission] = submission.place
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
