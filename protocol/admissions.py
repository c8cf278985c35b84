"""Who may contribute: the ledger's rules for admissions, as the manifest's `admission` asks for them.

A key is admitted once: any, one of a list, or one with an invite of the operator's, which is good for one key and until
its time is over by the ledger's own times. In each case a proof of work may be asked for on top (protocol.work).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

from protocol.constants import PROTOCOL_VERSION
from protocol.envelope import Opener, Signed, open_envelope
from protocol.errors import LedgerError, ProtocolError
from protocol.identity import PeerId
from protocol.records import Admission, AdmissionSpec, Invite
from protocol.work import work_holds

_UNCHECKED: Final[Opener] = partial(open_envelope, signature_checked=True)


@dataclass
class Admissions:
    """The keys that were admitted to one run."""

    run_id: bytes
    spec: AdmissionSpec
    operator: PeerId
    """Whose invites count."""
    admitted: dict[PeerId, int] = field(default_factory=dict)
    """By key: the number of its entry."""
    spent: set[bytes] = field(default_factory=set)
    """Tokens of invites that were used."""

    def admits(self, peer: PeerId) -> bool:
        """Whether this key may hand in work."""
        return not self.spec.is_asked_for or peer in self.admitted

    def check(self, entry: Signed[Admission], *, now_ms: int, work: bool, opens: Opener = open_envelope) -> None:
        """Raise LedgerError unless this may be the next entry. `now_ms` is the ledger's time; `work` costs a try."""
        record = entry.record
        if not self.spec.is_asked_for:
            raise LedgerError("this run is open: nobody has to be admitted", rule="not-needed")
        if entry.author in self.admitted:
            raise LedgerError(f"{entry.author.short} was admitted before", rule="duplicate")
        if record.protocol != PROTOCOL_VERSION:
            raise LedgerError(
                f"protocol {record.protocol}; this run speaks protocol {PROTOCOL_VERSION}", rule="protocol"
            )
        if self.spec.kind == "allow-list" and entry.author.public_key not in self.spec.allowed:
            raise LedgerError(f"{entry.author.short} is not on the run's allow-list", rule="not-allowed")
        if self.spec.kind == "invite":
            self._check_invite(record, now_ms, opens)
        if work and not work_holds(entry.author, self.run_id, record.nonce, bits=self.spec.work_bits):
            raise LedgerError(
                f"the proof of work has fewer than the {self.spec.work_bits} bits that this run asks for", rule="work"
            )

    def add(self, entry: Signed[Admission], place: int) -> None:
        """Take one in that was checked."""
        self.admitted[entry.author] = place
        if self.spec.kind == "invite":
            self.spent.add(_opened(entry.record.invite, _UNCHECKED).record.token)

    def _check_invite(self, record: Admission, now_ms: int, opens: Opener) -> None:
        if not record.invite:
            raise LedgerError("this run takes only who was invited, and there is no invite", rule="no-invite")
        invite = _opened(record.invite, opens)
        if invite.author != self.operator or invite.record.run_id != self.run_id:
            raise LedgerError("the invite is not by this run's operator, or for another run", rule="invite")
        if max(now_ms, record.issued_at_ms) > invite.record.valid_until_ms:
            raise LedgerError("the invite has expired", rule="invite-expired")
        if invite.record.token in self.spent:
            raise LedgerError("the invite was used before, by this or another key", rule="invite-spent")


def _opened(data: bytes, opens: Opener) -> Signed[Invite]:
    try:
        return opens(data, Invite)
    except ProtocolError as error:
        raise LedgerError(f"the invite does not hold: {error.message}", rule="invite") from error
