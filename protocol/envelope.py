"""Signed envelopes: the one form in which anything authoritative travels.

An envelope carries bytes and says who signed them. What is signed is the bytes carried, so no canonical form of a
record is needed. A record's `id` hashes what was signed, not the envelope's outer encoding or the signature, so that
re-encoding an envelope cannot give the same statement a second identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from protocol.constants import MAX_ENVELOPE_BYTES, PROTOCOL_VERSION, SIGNATURE_DOMAIN
from protocol.errors import MalformedError, SignatureError, VersionError, WrongAuthorError
from protocol.identity import KEY_BYTES, Identity, PeerId


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every record that travels in an envelope. `KIND` names it under the signature."""

    KIND: ClassVar[str]
    MAX_BYTES: ClassVar[int] = 64 * 1024


R = TypeVar("R", bound=Record)


class Opener(Protocol):
    """`open_envelope`, or the same with the signatures checked elsewhere."""

    def __call__(self, data: bytes, kind: type[R]) -> Signed[R]: ...


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    domain: str
    kind: str
    author: bytes
    payload: bytes
    signature: bytes


@dataclass(frozen=True)
class Signed(Generic[R]):
    """A record whose signature held, with the exact bytes that carried it."""

    record: R
    author: PeerId
    id: bytes
    data: bytes

    def require_author(self, *allowed: PeerId) -> Signed[R]:
        """Raise WrongAuthorError unless one of `allowed` signed this."""
        if self.author not in allowed:
            names = ", ".join(peer.short for peer in allowed) or "nobody"
            raise WrongAuthorError(f"{self.record.KIND} signed by {self.author.short}; only {names} may sign it")
        return self


def seal(record: Record, identity: Identity) -> bytes:
    """Sign a record; the bytes are what travels and what is stored."""
    payload = msgspec.msgpack.encode(record)
    author = identity.peer_id.public_key
    signature = identity.sign(_signed_bytes(SIGNATURE_DOMAIN, record.KIND, author, payload))
    return msgspec.msgpack.encode(_Envelope(SIGNATURE_DOMAIN, record.KIND, author, payload, signature))


def open_envelope(data: bytes, kind: type[R], *, signature_checked: bool = False) -> Signed[R]:
    """Check an envelope and decode its record.

    Raises MalformedError, VersionError or SignatureError; costs one signature check at most, and allocates no more
    than the input's size. `signature_checked` leaves that one out: another process has done it for these very bytes.
    """
    _require_size(data, kind)
    envelope = _decode(data, _Envelope, "envelope")
    if envelope.domain != SIGNATURE_DOMAIN:
        raise _version_error(envelope)
    if envelope.kind != kind.KIND:
        raise MalformedError(f"expected a {kind.KIND}, got a {envelope.kind[:40]!r}")
    return _open(envelope, data, kind, signature_checked)


def open_one_of(
    data: bytes, kinds: Mapping[str, type[Record]], *, signature_checked: bool = False
) -> Signed[Any] | str:
    """The same for an envelope of any of several kinds; the name of its kind where it is none of them."""
    envelope = _envelope(data)
    kind = kinds.get(envelope.kind)
    if kind is None:
        return envelope.kind
    _require_size(data, kind)
    if envelope.domain != SIGNATURE_DOMAIN:
        raise _version_error(envelope)
    return _open(envelope, data, kind, signature_checked)


def _require_size(data: bytes, kind: type[Record]) -> None:
    if len(data) > min(MAX_ENVELOPE_BYTES, kind.MAX_BYTES + 1024):
        raise MalformedError(f"{kind.KIND} of {len(data)} bytes; at most {kind.MAX_BYTES} are allowed")


def _open(envelope: _Envelope, data: bytes, kind: type[R], signature_checked: bool) -> Signed[R]:
    author = PeerId(envelope.author)
    signed = _signed_bytes(envelope.domain, envelope.kind, envelope.author, envelope.payload)
    if not signature_checked and not author.verify(signed, envelope.signature):
        raise SignatureError(f"the signature on a {kind.KIND} that names {author.short} as its author does not hold")
    record = _decode(envelope.payload, kind, kind.KIND)
    return Signed(record, author, hashlib.sha256(signed).digest(), data)


def kind_of(data: bytes) -> str:
    """What an envelope says it carries, before anything is checked. Raises MalformedError."""
    return _envelope(data).kind


def id_of(data: bytes) -> bytes:
    """The id that an envelope's record has if its signature holds, which is not checked. Raises MalformedError."""
    envelope = _envelope(data)
    return hashlib.sha256(_signed_bytes(envelope.domain, envelope.kind, envelope.author, envelope.payload)).digest()


def signature_of(data: bytes) -> bytes:
    """The signature that an envelope carries; whether it holds is `open_envelope`'s to say. Raises MalformedError."""
    envelope: _Envelope = _decode(data, _Envelope, "envelope")
    return envelope.signature


def _envelope(data: bytes) -> _Envelope:
    if len(data) > MAX_ENVELOPE_BYTES:
        raise MalformedError(f"an envelope of {len(data)} bytes; at most {MAX_ENVELOPE_BYTES} are allowed")
    envelope: _Envelope = _decode(data, _Envelope, "envelope")
    return envelope


def _signed_bytes(domain: str, kind: str, author: bytes, payload: bytes) -> bytes:
    place, name = domain.encode(), kind.encode()
    return b"".join((_size(place), place, _size(name), name, _size(author), author, _size(payload), payload))


def _size(part: bytes) -> bytes:
    return len(part).to_bytes(4, "big")


_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]


def _decode(data: bytes, kind: type[Any], name: str) -> Any:
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedError(f"not a valid {name}: {str(error)[:200]}") from error


def _version_error(envelope: _Envelope) -> VersionError:
    author = _proved_author(envelope)
    theirs = envelope.domain[:40]
    return VersionError(
        f"a {envelope.kind[:40]!r} from {author.short if author else 'an unproved author'} speaks {theirs!r}; "
        f"this program speaks {SIGNATURE_DOMAIN!r}",
        author=author,
        hint=_upgrade_hint(theirs),
    )


def _upgrade_hint(theirs: str) -> str:
    """Whose software is too old: domains end in the protocol's version, a number that rises."""
    name, _, number = theirs.rpartition("/")
    newer = number.isascii() and number.isdigit() and int(number) > PROTOCOL_VERSION
    if name == SIGNATURE_DOMAIN.rpartition("/")[0] and not newer:
        return f"ask that peer to install the intellect-node release that speaks {SIGNATURE_DOMAIN!r}"
    return f"install the intellect-node release that speaks {theirs!r}: pip install --upgrade intellect-node"


def _proved_author(envelope: _Envelope) -> PeerId | None:
    """Who signed an envelope of another protocol version, if the way of signing is still the same."""
    if len(envelope.author) != KEY_BYTES:
        return None
    author = PeerId(envelope.author)
    signed = _signed_bytes(envelope.domain, envelope.kind, envelope.author, envelope.payload)
    return author if author.verify(signed, envelope.signature) else None
