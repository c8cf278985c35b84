"""Whom this node talks to over HTTPS: which certificate is the right one, and how to be let in there.

One Contact for each relay at each of its URLs: it proves this node's key when a request needs it, keeps the token for
as long as it lasts, and keeps quiet for as long as the relay asked for. Made in trio's thread; what changes in one is
used by p2p.http's client alone, in the HTTP thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Final, TypeVar

import aiohttp
import msgspec

from protocol.envelope import Signed, seal
from protocol.errors import MalformedError, RefusedError, RelayError
from protocol.identity import Identity, PeerId
from protocol.records import Hello, RelayAdvert

T = TypeVar("T")

MAX_CONTACTS: Final = 256
MAX_TOKEN_S: Final = 3600.0
SPARE_S: Final = 30.0
"""A token is renewed this long before it ends."""
MAX_PATIENCE_S: Final = 10.0
"""Longer silences are refusals at once, so that the caller can ask another relay."""

PostHello = Callable[[str, bytes], Awaitable[bytes]]
"""(URL, body) -> the answer's body."""


@lru_cache(maxsize=MAX_CONTACTS)
def _pinned(fingerprint: bytes) -> aiohttp.Fingerprint:
    """One object a certificate: with another one, though equal, aiohttp opens a new connection and keeps the old."""
    return aiohttp.Fingerprint(fingerprint)


class Contact:
    """One relay, or the trainer's origin, at one URL. `url` is the part before `/v1`."""

    def __init__(
        self,
        peer: PeerId,
        url: str,
        fingerprint: bytes,
        *,
        identity: Identity | None = None,
        run: bytes = b"",
        token: str = "",
    ) -> None:
        """Signs in as `identity` at a relay of `run`; or uses a `token` that was given by other means."""
        if not url.startswith("https://"):
            raise MalformedError(f"tokens never travel in clear, and {url[:100]!r} is no https URL")
        self.peer = peer
        self.url = url.rstrip("/")
        self.fingerprint = fingerprint
        self.tls = _pinned(fingerprint)
        self._identity = identity
        self._run = run
        self._token = token
        self._token_ends = float("inf") if token else 0.0
        self._signing_in = asyncio.Lock()
        self._quiet_until = {False: 0.0, True: 0.0}

    def __repr__(self) -> str:
        return f"Contact({self.peer.short}, {self.url})"

    async def authorization(self, post: PostHello) -> str:
        """The Authorization header, after proving the key if there is no token. Raises RelayError, RefusedError."""
        async with self._signing_in:
            if self._identity is not None and self._token_ends - SPARE_S < time.monotonic():
                self._token, lasts_s = await self._sign_in(self._identity, post)
                self._token_ends = time.monotonic() + lasts_s
            return f"Bearer {self._token}"

    def renew(self, refused: str) -> bool:
        """Whether it is worth asking again, after this header was not accepted."""
        if self._identity is None:
            return False
        if refused == f"Bearer {self._token}":
            self._token_ends = 0.0
        return True

    def hush(self, seconds: float, *, bulk: bool) -> None:
        """Keep quiet, with bulk or with all else, as the relay asked for."""
        self._quiet_until[bulk] = max(self._quiet_until[bulk], time.monotonic() + seconds)

    async def quiet(self, *, bulk: bool) -> None:
        """Wait until the relay may be asked. Raises RefusedError `too-many-requests` when that is not soon."""
        left_s = self._quiet_until[bulk] - time.monotonic()
        if left_s > MAX_PATIENCE_S:
            raise RefusedError(
                f"relay {self.peer.short} has asked not to be asked for {left_s:.0f} s",
                code="too-many-requests",
                hint="nothing to do: other relays are asked meanwhile",
                retry_after_s=left_s,
            )
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _sign_in(self, identity: Identity, post: PostHello) -> tuple[str, float]:
        url = f"{self.url}/v1/hello"
        nonce = _decode(await post(url, msgspec.msgpack.encode({"key": identity.peer_id.public_key})), _Challenge).nonce
        if not 16 <= len(nonce) <= 128:
            raise RelayError(f"relay {self.peer.short} gave a challenge of {len(nonce)} bytes")
        hello = Hello(run=self._run, relay=self.peer.public_key, nonce=nonce)
        granted = _decode(await post(url, msgspec.msgpack.encode({"hello": seal(hello, identity)})), _Granted)
        if not (granted.token.isascii() and granted.token.isprintable() and 0 < len(granted.token) <= 512):
            raise RelayError(f"relay {self.peer.short} gave a token that is no token")
        return granted.token, min(max(granted.valid_s, SPARE_S + 1), MAX_TOKEN_S)


class Contacts:
    """The contacts of one node, so that whatever asks a relay shares one token. Trio's thread only."""

    def __init__(self, identity: Identity, run: bytes) -> None:
        """`run` is RunAddress.digest."""
        self._identity = identity
        self._run = run
        self._contacts: OrderedDict[tuple[PeerId, str, bytes], Contact] = OrderedDict()

    def of(self, advert: Signed[RelayAdvert]) -> Contact:
        """The relay of an advert, at the URL and with the certificate that it names."""
        return self.at(advert.author, advert.record.http_url, advert.record.tls_fingerprint)

    def at(self, peer: PeerId, url: str, fingerprint: bytes) -> Contact:
        """A relay at a URL, with its certificate's fingerprint."""
        key = (peer, url, fingerprint)
        if key not in self._contacts:
            self._contacts[key] = Contact(peer, url, fingerprint, identity=self._identity, run=self._run)
        self._contacts.move_to_end(key)
        while len(self._contacts) > MAX_CONTACTS:
            self._contacts.popitem(last=False)
        return self._contacts[key]


class _Challenge(msgspec.Struct):
    nonce: bytes


class _Granted(msgspec.Struct):
    token: str
    valid_s: float


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RelayError(f"an answer to a hello that does not decode: {str(error)[:200]}") from error
