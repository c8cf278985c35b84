"""Proof that a trainer has signed two ledgers: a file that anyone can check with nothing but the file.

Two heads of one run contradict each other if neither's ledger continues the other's: the same length with different
tips, or different lengths where the entries between them lead to the longer tip from another one than the shorter's.
Who has the chain's hashes cannot be led to a tip by two ways, so such entry ids convict nobody but who signed. Which of
the two ledgers is the right one is for people to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.constants import SIGNATURE_DOMAIN
from protocol.envelope import Signed, open_envelope
from protocol.errors import MalformedError, WrongRunError
from protocol.identity import PeerId
from protocol.ledger import next_tip
from protocol.records import Digest, Head, Manifest
from protocol.run import RunAddress

DOMAIN: Final = f"{SIGNATURE_DOMAIN} fork"
ID_BYTES: Final = 32
MAX_BETWEEN: Final = 1 << 20
"""Entries between the two heads at most: 32 MiB of ids."""
MAX_PROOF_BYTES: Final = MAX_BETWEEN * ID_BYTES + (64 << 10)


class _Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    domain: str
    manifest: Annotated[bytes, Meta(max_length=Manifest.MAX_BYTES + 1024)]
    shorter: Annotated[bytes, Meta(max_length=Head.MAX_BYTES + 1024)]
    longer: Annotated[bytes, Meta(max_length=Head.MAX_BYTES + 1024)]
    base: Digest
    """The tip of the longer head's ledger where it is as long as the shorter head's."""
    between: Annotated[bytes, Meta(max_length=MAX_BETWEEN * ID_BYTES)]
    """Ids of the longer ledger's entries from there on, laid end to end."""


@dataclass(frozen=True)
class Fork:
    """Two heads by one key that contradict each other, proved."""

    manifest: Signed[Manifest]
    shorter: Signed[Head]
    longer: Signed[Head]
    base: bytes
    between: int
    """Entries from the shorter length to the longer."""

    @property
    def run(self) -> RunAddress:
        return RunAddress(self.manifest.author, self.manifest.record.name)

    @property
    def trainer(self) -> PeerId:
        return self.manifest.record.trainer_id


def make_proof(
    manifest: Signed[Manifest],
    one: Signed[Head],
    other: Signed[Head],
    *,
    base: bytes | None = None,
    between: Sequence[bytes] = (),
) -> bytes:
    """The file's bytes. Raises ProtocolError unless the two heads contradict each other.

    For heads of different lengths `between` are the entry ids of the longer one's ledger from the shorter length on,
    and `base` is its tip there.
    """
    shorter, longer = sorted((one, other), key=lambda head: head.record.ledger_length)
    proof = _Proof(
        domain=DOMAIN,
        manifest=manifest.data,
        shorter=shorter.data,
        longer=longer.data,
        base=longer.record.ledger_tip if base is None else base,
        between=b"".join(between),
    )
    data = msgspec.msgpack.encode(proof)
    open_proof(data)
    return data


def open_proof(data: bytes) -> Fork:
    """Check a proof: signatures, one run, one trainer, and that the heads cannot both be true. Raises ProtocolError."""
    proof = _decode(data)
    manifest = open_envelope(proof.manifest, Manifest)
    shorter, longer = (
        open_envelope(head, Head).require_author(manifest.record.trainer_id) for head in (proof.shorter, proof.longer)
    )
    for head in (shorter, longer):
        if head.record.run_id != manifest.id:
            raise WrongRunError("a head of another run than the manifest's")
    _require_contradiction(proof, shorter.record, longer.record)
    return Fork(manifest, shorter, longer, proof.base, len(proof.between) // ID_BYTES)


def _decode(data: bytes) -> _Proof:
    if len(data) > MAX_PROOF_BYTES:
        raise MalformedError(f"a fork's proof of {len(data)} bytes; at most {MAX_PROOF_BYTES} are taken")
    try:
        proof = msgspec.msgpack.decode(data, type=_Proof)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedError(f"not a fork's proof: {str(error)[:200]}") from error
    if proof.domain != DOMAIN:
        raise MalformedError(f"not a fork's proof of this protocol: {proof.domain[:40]!r}")
    return proof


def _require_contradiction(proof: _Proof, shorter: Head, longer: Head) -> None:
    between = longer.ledger_length - shorter.ledger_length
    if between < 0 or len(proof.between) != between * ID_BYTES:
        raise MalformedError(
            f"ledgers of {shorter.ledger_length} and {longer.ledger_length} entries need {max(0, between)} ids between"
        )
    tip = proof.base
    for start in range(0, len(proof.between), ID_BYTES):
        tip = next_tip(tip, proof.between[start : start + ID_BYTES])
    if tip != longer.ledger_tip:
        raise MalformedError("the ids do not lead to the longer head's tip")
    if proof.base == shorter.ledger_tip:
        raise MalformedError("the two heads do not contradict each other: the longer ledger continues the shorter")
