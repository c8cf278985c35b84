"""Who a node is: an Ed25519 key, named by its libp2p peer id.

The same key authenticates connections (libp2p) and signs records. Key files are the node's business (node.identity).
Peer id: base58btc of the identity multihash of the protobuf public key (libp2p peer-ids specification).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import base58
from nacl.bindings import crypto_sign_open
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey

from protocol.errors import MalformedError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_PEER_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of a protobuf public key {Ed25519, 32 bytes}


@dataclass(frozen=True, order=True)
class PeerId:
    """A node's public key; prints as its libp2p peer id (`12D3KooW…`)."""

    public_key: bytes

    def __post_init__(self) -> None:
        if len(self.public_key) != KEY_BYTES:
            raise MalformedError(f"a public key has {KEY_BYTES} bytes, not {len(self.public_key)}")

    def __hash__(self) -> int:
        return hash(self.public_key)  # which bytes remember, as a tuple of them does not

    def __str__(self) -> str:
        return str(base58.b58encode(_PEER_ID_PREFIX + self.public_key), "ascii")

    @property
    def short(self) -> str:
        """Last eight characters: enough for people and logs to tell nodes apart."""
        return str(self)[-8:]

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """Read a peer id as people write it. Raises MalformedError."""
        try:
            raw = base58.b58decode(text[:80])
        except ValueError as error:
            raise MalformedError(f"not a peer id: {text[:80]!r}") from error
        if not raw.startswith(_PEER_ID_PREFIX) or len(raw) != len(_PEER_ID_PREFIX) + KEY_BYTES:
            raise MalformedError(f"not an Ed25519 peer id (they begin with 12D3KooW): {text[:80]!r}")
        return cls(raw[len(_PEER_ID_PREFIX) :])

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether this key signed the message. Never raises, whatever the bytes."""
        if len(signature) != SIGNATURE_BYTES:
            return False
        try:
            crypto_sign_open(signature + message, self.public_key)
        except (BadSignatureError, ValueError, TypeError):
            return False
        return True


class Identity:
    """A node's secret key. `seed` is 32 bytes; libp2p and PyNaCl derive the same key pair from it."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise MalformedError(f"a secret key has {KEY_BYTES} bytes, not {len(seed)}")
        self._key = SigningKey(seed)
        self.peer_id = PeerId(bytes(self._key.verify_key))

    @property
    def seed(self) -> bytes:
        return bytes(self._key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message).signature

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def from_phrase(cls, phrase: str) -> Identity:
        """A reproducible key for tests and simulations; never for a real node."""
        return cls(hashlib.sha256(phrase.encode()).digest())
