"""Proof of a key, and the short-lived token that stands for it: the server's side, which remembers nothing.

A challenge and a token carry all that is needed to check them, under a MAC whose key is drawn when the process starts.
So strangers cannot fill a table, and a restart ends every token: clients prove themselves again by themselves.
Who may have a token is decided by whoever uses this (node.relay.door).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import struct
import time
from collections.abc import Callable
from typing import Final

from protocol.envelope import Signed
from protocol.errors import RefusedError, WrongAuthorError, WrongRunError
from protocol.identity import KEY_BYTES, PeerId
from protocol.records import Hello

CHALLENGE_S: Final = 60.0
TOKEN_S: Final = 900.0

_MAC_BYTES: Final = 32
_ENDS: Final = struct.Struct(">d")
_SALT_BYTES: Final = 16
_CHALLENGE_BYTES: Final = _SALT_BYTES + _ENDS.size + _MAC_BYTES
_TOKEN_BYTES: Final = KEY_BYTES + _ENDS.size + _MAC_BYTES
_BEARER: Final = "Bearer "


class TokenMint:
    """Challenges and tokens of one relay for one run. Stateless; safe from any thread."""

    def __init__(
        self,
        relay: PeerId,
        run: bytes,
        *,
        token_s: float = TOKEN_S,
        challenge_s: float = CHALLENGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._relay = relay
        self._run = run
        self._token_s = token_s
        self._challenge_s = challenge_s
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    @property
    def token_s(self) -> float:
        """How long a token lasts."""
        return self._token_s

    def challenge(self, key: bytes) -> bytes:
        """A nonce for one key, good for a minute."""
        body = secrets.token_bytes(_SALT_BYTES) + _ENDS.pack(self._clock() + self._challenge_s)
        return body + self._mac(b"challenge", key, body)

    def check_hello(self, hello: Signed[Hello]) -> PeerId:
        """Who proved a key. Raises WrongRunError, WrongAuthorError (said to another relay) or RefusedError."""
        record, key = hello.record, hello.author.public_key
        if record.run != self._run:
            raise WrongRunError(
                "a hello for another run than this relay's",
                hint="compare --run on both sides: it must be the same address",
            )
        if record.relay != self._relay.public_key:
            raise WrongAuthorError(f"this hello is for relay {PeerId(record.relay).short}, not for this one")
        body, mac = record.nonce[:-_MAC_BYTES], record.nonce[-_MAC_BYTES:]
        if len(record.nonce) != _CHALLENGE_BYTES or not hmac.compare_digest(mac, self._mac(b"challenge", key, body)):
            raise _stale("this challenge was not given to this key by this process")
        if self._has_ended(body[_SALT_BYTES:]):
            raise _stale(f"the challenge was answered after more than {self._challenge_s:g} s")
        return hello.author

    def token(self, holder: PeerId) -> str:
        """A token for a key that was proved."""
        body = holder.public_key + _ENDS.pack(self._clock() + self._token_s)
        return base64.urlsafe_b64encode(body + self._mac(b"token", body)).decode("ascii")

    def holder(self, authorization: str) -> PeerId:
        """Whose token an Authorization header carries. Raises RefusedError `unauthorized`."""
        token = _decode(authorization)
        body, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
        if len(token) != _TOKEN_BYTES or not hmac.compare_digest(mac, self._mac(b"token", body)):
            raise _unauthorized("this relay serves nodes that proved their key")
        if self._has_ended(body[KEY_BYTES:]):
            raise _unauthorized("the token has ended")
        return PeerId(body[:KEY_BYTES])

    def _has_ended(self, packed: bytes) -> bool:
        ends: float = _ENDS.unpack(packed)[0]
        return ends < self._clock()

    def _mac(self, *parts: bytes) -> bytes:
        message = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        return hmac.digest(self._secret, message, "sha256")


def _decode(authorization: str) -> bytes:
    if not authorization.startswith(_BEARER) or len(authorization) > 256:
        return b""
    try:
        return base64.urlsafe_b64decode(authorization.removeprefix(_BEARER))
    except (ValueError, binascii.Error):
        return b""


def _unauthorized(message: str) -> RefusedError:
    return RefusedError(message, code="unauthorized", hint="POST /v1/hello gives a token; see docs/protocol.md")


def _stale(message: str) -> RefusedError:
    return RefusedError(message, code="stale-challenge", hint="ask POST /v1/hello for a new challenge")
