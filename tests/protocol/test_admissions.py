"""Who may contribute: open runs, proofs of work, allow-lists and invites."""

from __future__ import annotations

from typing import Any

import pytest
from factories import (
    OPERATOR,
    make_admission,
    make_batch,
    make_invite,
    make_manifest,
    make_submission,
    make_verdict,
    sealed,
)
from ledger_kit import refused

from protocol.errors import LedgerError, WrongRunError
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import AdmissionSpec, Invite
from protocol.work import find_work

RUN = b"r" * 32


def ledger(kind: Any = "invite", **spec: Any) -> LedgerState:
    return LedgerState(RUN, make_manifest(admission=AdmissionSpec(kind=kind, **spec)))


def invited(who: Identity, number: int = 0, **changes: Any) -> bytes:
    return make_admission(who, RUN, invite=make_invite(RUN, number).data, **changes).data


def test_an_open_run_admits_everybody_and_keeps_no_list(alice: Identity) -> None:
    """Keys that cost nothing would otherwise fill the ledger."""
    state = ledger("open")
    state.apply(make_submission(alice, RUN).data)
    assert state.admitted(alice.peer_id)
    assert refused(state, make_admission(alice, RUN).data) == "not-needed"


def test_work_comes_after_admission_and_admission_comes_once(alice: Identity, bob: Identity) -> None:
    state = ledger()
    assert refused(state, make_submission(alice, RUN).data) == "not-admitted"
    state.apply(invited(alice))
    state.apply(make_submission(alice, RUN).data)
    assert (state.admitted(alice.peer_id), state.admitted(bob.peer_id)) == (True, False)
    assert state.contributors[alice.peer_id].admitted_at == 0
    assert refused(state, invited(alice, 1)) == "duplicate"


def test_only_listed_keys_are_admitted(alice: Identity, bob: Identity) -> None:
    state = ledger("allow-list", allowed=(alice.peer_id.public_key,))
    assert refused(state, make_admission(bob, RUN).data) == "not-allowed"
    state.apply(make_admission(alice, RUN).data)


def test_too_little_work_is_refused(alice: Identity) -> None:
    state = ledger("open", work_bits=1)
    good = make_admission(alice, RUN, bits=1)
    bad = make_admission(alice, RUN, nonce=(int.from_bytes(good.record.nonce, "big") - 1).to_bytes(8, "big"))
    assert refused(state, bad.data) == "work"
    state.check_admission(bad, work=False)
    state.check_admission(good)
    state.apply(good.data)


def test_work_done_for_another_key_does_not_count(alice: Identity, bob: Identity) -> None:
    """One machine's work is sold to many keys."""
    state = ledger("open", work_bits=2)
    assert refused(state, make_admission(alice, RUN, nonce=find_work(bob.peer_id, RUN, bits=2)).data) == "work"


def test_an_invite_is_good_for_one_key(alice: Identity, bob: Identity) -> None:
    """An invite is passed on: the first key that uses it is in, the next one is not."""
    state = ledger()
    state.apply(invited(alice))
    assert refused(state, invited(bob)) == "invite-spent"
    state.apply(invited(bob, 1))


@pytest.mark.parametrize(
    ("invite", "rule"),
    [
        (b"", "no-invite"),
        (b"not an envelope", "invite"),
        (make_invite(RUN, by=Identity.from_phrase("mallory")).data, "invite"),
        (make_invite(b"x" * 32).data, "invite"),
        (make_invite(RUN).data[:-1] + b"\0", "invite"),
        (make_invite(RUN, valid_until_ms=9).data, "invite-expired"),
    ],
    ids=["none", "garbage", "by-mallory", "other-run", "forged", "expired"],
)
def test_bad_invites_are_named(alice: Identity, invite: bytes, rule: str) -> None:
    assert refused(ledger(), make_admission(alice, RUN, invite=invite, issued_at_ms=10).data) == rule


def test_an_old_admission_does_not_revive_an_expired_invite(alice: Identity, bob: Identity) -> None:
    """An admission is dated back: the ledger's own time says that the invite is over."""
    state = ledger()
    state.apply(invited(alice))
    submissions = [make_submission(alice, RUN, index=index) for index in (0, 1)]
    for submission in submissions:
        state.apply(submission.data)
        state.apply(make_verdict(submission).data)
    state.apply(make_batch(RUN, 0, submissions, issued_at_ms=1000))
    late = make_admission(bob, RUN, invite=make_invite(RUN, 1, valid_until_ms=999).data, issued_at_ms=1)
    assert refused(state, late.data) == "invite-expired"


def test_invites_are_the_operators_not_the_trainers(alice: Identity, bob: Identity) -> None:
    manifest = make_manifest(admission=AdmissionSpec(kind="invite"))
    state = LedgerState(RUN, manifest, operator=bob.peer_id)
    assert refused(state, invited(alice)) == "invite"
    state.apply(make_admission(alice, RUN, invite=make_invite(RUN, by=bob).data).data)


def test_an_admission_for_another_protocol_or_run_is_refused(alice: Identity) -> None:
    state = ledger()
    assert refused(state, invited(alice, protocol=2)) == "protocol"
    with pytest.raises(WrongRunError):
        state.apply(make_admission(alice, b"x" * 32, invite=make_invite(RUN).data).data)


def test_an_invite_opened_with_its_signature_checked_elsewhere_is_spent_all_the_same(alice: Identity) -> None:
    manifest = make_manifest(admission=AdmissionSpec(kind="invite"))
    state = LedgerState(RUN, manifest, signatures_checked=True)
    state.apply(invited(alice))
    with pytest.raises(LedgerError, match="used before"):
        state.apply(invited(Identity.from_phrase("bob")))


def test_tokens_tell_invites_apart_not_their_signatures(alice: Identity, bob: Identity) -> None:
    """The operator signs the same token with another date: still one key."""
    state = ledger()
    state.apply(invited(alice))
    again = sealed(Invite(run_id=RUN, token=bytes(16), valid_until_ms=5000), OPERATOR)
    assert refused(state, make_admission(bob, RUN, invite=again.data).data) == "invite-spent"
