"""Which submissions get the costly checks: a draw that nobody can foresee and anybody can make again.

The beacon is the first head that the trainer signs after the relay's receipt: `H("beacon", its signature)`. Neither a
relay nor a contributor can compute it before the trainer signs, though all that the head says can be guessed. The draw
is one per submission, so that the validators of a quorum make the same one; the rate is the contributor's, from the
ledger as it stood at that head. Checking more than the draw asks is always right, checking less never.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

from protocol.constants import SIGNATURE_DOMAIN
from protocol.envelope import Opener, R, Signed, open_envelope, signature_of
from protocol.errors import MalformedError, WrongRunError
from protocol.identity import PeerId
from protocol.records import CheckSpec, Head, Manifest, Receipt, Verdict

_SCALE: Final = float(1 << 64)
_HEADS: Final = 256
"""A head draws for all that relays took since the one before, so the last few come again and again."""


@dataclass(frozen=True)
class TrackRecord:
    """A contributor's settled submissions in some beginning of the ledger."""

    accepted: int = 0
    rejected: int = 0
    streak: int = 0
    """Accepted ones since the last rejection."""


def check_rate(record: TrackRecord, spec: CheckSpec) -> float:
    """The share of a contributor's submissions that is checked in full, in (0, 1].

    1 until `newcomer_submissions` are accepted, and again after any rejection; then newcomer_submissions / streak, so
    that checks grow with the logarithm of the work, down to the floor.
    """
    return max(spec.floor, min(1.0, spec.newcomer_submissions / max(1, record.streak)))


def beacon_of(head: Signed[Head]) -> bytes:
    """What a head draws with. Its id would not do: it covers only what can be guessed to the millisecond."""
    return _beacon(head.data)


@lru_cache(maxsize=_HEADS)
def _beacon(head: bytes) -> bytes:
    return _hash("beacon", signature_of(head))


def is_drawn(beacon: bytes, submission_id: bytes, *, rate: float) -> bool:
    """Whether a submission is checked in full: H("draw", beacon, id) as a fraction of 2^64 lies below the rate."""
    return int.from_bytes(_hash("draw", beacon, submission_id)[:8], "big") / _SCALE < rate


def is_first_after(head: Head, receipt: Receipt) -> bool:
    """Whether no head lies between the one that a receipt names and this one."""
    return head.previous_sequence <= receipt.head_sequence < head.sequence


def opening_heads_once(opens: Opener) -> Opener:
    """The same opener, which remembers the last heads by their very bytes."""

    @lru_cache(maxsize=_HEADS)
    def head(data: bytes) -> Signed[Head]:
        return opens(data, Head)

    def open_(data: bytes, kind: type[R]) -> Signed[R]:
        return cast("Signed[R]", head(data)) if kind is Head else opens(data, kind)

    return open_


RecordAt = Callable[[PeerId, int], TrackRecord]
"""A contributor's record in the first so many entries of the ledger."""


def prove_undrawn(verdict: Verdict, manifest: Manifest, *, record_at: RecordAt, opens: Opener = open_envelope) -> None:
    """Check that a verdict's own evidence excuses it from the costly checks. Raises ProtocolError if it does not."""
    head = opens(verdict.draw.beacon, Head).require_author(manifest.trainer_id)
    receipt = opens(verdict.draw.receipt, Receipt)
    if not head.record.run_id == receipt.record.run_id == verdict.run_id:
        raise WrongRunError("the draw's beacon or receipt is of another run")
    if receipt.record.submission != verdict.submission:
        raise MalformedError("the draw's receipt is for another submission")
    if not is_first_after(head.record, receipt.record):
        raise MalformedError("the draw's beacon is not the first head after the receipt")
    rate = check_rate(record_at(PeerId(verdict.contributor), head.record.ledger_length), manifest.checks)
    if verdict.draw.rate != rate:
        raise MalformedError(f"the draw's rate is {verdict.draw.rate:.4g}; the ledger at its beacon gives {rate:.4g}")
    if is_drawn(beacon_of(head), verdict.submission, rate=rate):
        raise MalformedError("the beacon draws this submission, and the verdict is without the costly checks")


def judges(lot: bytes, submission: bytes, validators: Iterable[PeerId]) -> list[PeerId]:
    """A run's validators in the order in which they are called to judge a submission: the first `quorum` of them do,
    the others stand by. `lot` is the beacon of the first head after its receipt, or an appeal's id, so that nobody can
    choose his judges.
    """
    return sorted(validators, key=lambda one: _hash("judge", lot, submission, one.public_key))


def _hash(purpose: str, *parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in (f"{SIGNATURE_DOMAIN} draw/{purpose}".encode(), *parts):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
