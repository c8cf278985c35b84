"""Where a key stands by a relay's copy of the ledger: what a contributor asks for instead of replaying it itself."""

from __future__ import annotations

from collections.abc import Sequence

from node.ledger.memory import looked_at
from node.membership import MAX_APPEALS_SHOWN, MAX_REJECTIONS_SHOWN, AppealRow, Standing, SubmissionRow
from protocol.identity import PeerId
from protocol.ledger import LedgerState, LedgerSubmission
from protocol.standing import Contributor


def standing_of(state: LedgerState, peer: PeerId, submissions: Sequence[bytes]) -> Standing:
    """Standing, credits, appeals, and what became of those of the submissions that are this key's."""
    one = state.contributors.get(peer, Contributor())
    return Standing(
        ledger_length=state.length,
        trained=len(state.trained),
        admitted=state.admitted(peer),
        standing=one.standing,
        reason=one.reason,
        evicted_for=one.evicted_for,
        mature=one.balance.mature,
        maturing=one.balance.maturing,
        forfeited=one.balance.forfeited,
        next_appeal=one.next_appeal,
        appeals=_appeals(state, peer),
        submissions=_submissions(state, peer, submissions),
    )


def _appeals(state: LedgerState, peer: PeerId) -> tuple[AppealRow, ...]:
    return tuple(_appeal(state, key) for key in state.appeals_by(peer)[-MAX_APPEALS_SHOWN:])


def _appeal(state: LedgerState, key: bytes) -> AppealRow:
    case, tally = state.appeals[key], state.appeal_tally(key)
    return AppealRow(
        key,
        case.record.submission,
        case.state,
        case.answer,
        accepts=tally.accepts,
        rejects=tally.rejects,
        needed=tally.needed,
        once_more=state.may_appeal_again(key),
    )


def _submissions(state: LedgerState, peer: PeerId, keys: Sequence[bytes]) -> tuple[SubmissionRow, ...]:
    found = [(key, looked_at(state.submissions, key)) for key in keys]
    return tuple(_submission(key, one) for key, one in found if one is not None and one.author == peer)


def _submission(key: bytes, one: LedgerSubmission) -> SubmissionRow:
    rejections = [verdict.id for verdict in one.rejections() if not verdict.record.appeal]
    shown = rejections[:MAX_REJECTIONS_SHOWN] if one.state == "rejected" else ()
    return SubmissionRow(key, one.state, one.used_in, tuple(shown))
