"""The relay's door: who gets in, how often, and how much they may carry.

A node proves its key once (`POST /v1/hello`), then shows a token that is bound to it. Every other request but
`GET /v1/info` needs one. From the key follows what its holder is: the run's trainer, a validator, another relay of the
run, evicted, or a contributor like all others. Rates hold back identities and addresses; a budget of bytes a day ends
bulk, never control. Asyncio code on the HTTP thread; its tables are bounded.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from node.clock import now_ms
from node.relay.desk import RelayDesk
from node.relay.store import RelayStore
from p2p.http import msgpack_response, read_body
from p2p.limits import Buckets, DailyBudget, Rate
from p2p.tokens import TokenMint
from protocol.envelope import open_envelope
from protocol.errors import MalformedError, RefusedError
from protocol.identity import PeerId
from protocol.records import Hello, Verdict

log = logging.getLogger(__name__)

HELLO: Final = "/v1/hello"
OPEN: Final = ("/v1/info", HELLO)
BUDGET: Final = "traffic"
"""Document of the store: day and bytes, so that a relay that starts again today goes on with today's budget."""
HELLO_COST: Final = 5
"""A hello's signature costs as much as several requests."""
ADMISSION: Final = "/v1/admissions"
ADMISSION_COST: Final = 20
"""A proof of work takes tens of milliseconds to check."""
EVICTED_RATE: Final = Rate(1.0, 20.0)
"""Requests of one evicted key, which may ask for its verdicts and standing, and appeal."""
MAX_HELLO_BYTES: Final = 4096
HELLO_TIMEOUT_S: Final = 5.0
REQUEST_BURST_S: Final = 5.0
BYTES_BURST_S: Final = 8.0
"""A burst may be as much as this long brings at the steady rate."""

_BULK: Final = frozenset(
    {("checkpoints", "shards"), ("checkpoints", "packed"), ("checkpoints", "patches"), ("submissions", "file")}
)
_LEDGER_SEGMENT: Final = ["v1", "ledger", "segments"]
_COSTS: Final = {HELLO: HELLO_COST, ADMISSION: ADMISSION_COST}
"""In requests; all others are one."""
_PEER: Final = web.RequestKey("peer", PeerId)


@dataclass(frozen=True)
class DoorLimits:
    """What node.config lets an operator set; 0 is no limit. Rates are a second's, in the long run."""

    requests_per_s: float = 0.0
    """Of one identity, as the next two; trainer and validators are exempt."""
    bytes_per_s: float = 0.0
    upload_bytes_per_s: float = 0.0
    relay_requests_per_s: float = 0.0
    """Of one other relay of the run, in the place of `requests_per_s`, as the next one."""
    relay_bytes_per_s: float = 0.0
    address_requests_per_s: float = 0.0
    """Of one address, whoever is there, as the next one."""
    address_bytes_per_s: float = 0.0
    bytes_per_day: int = 0
    allow: frozenset[PeerId] = field(default_factory=frozenset)
    """Who gets in beside trainer and validators; empty: everyone."""


NO_LIMITS: Final = DoorLimits()


@dataclass(frozen=True)
class _Rates:
    """What holds back each identity of one class."""

    requests: Buckets
    bytes: Buckets

    @classmethod
    def of(cls, requests_per_s: float, bytes_per_s: float) -> _Rates:
        requests = Rate.with_burst(requests_per_s, REQUEST_BURST_S)
        return cls(Buckets(requests), Buckets(Rate.with_burst(bytes_per_s, BYTES_BURST_S)))


class Door:
    """Middleware and the hello route of one relay. `on_answer` charges answers: give it to the HttpServer too."""

    def __init__(
        self, desk: RelayDesk, store: RelayStore, limits: DoorLimits, *, clock: Callable[[], int] = now_ms
    ) -> None:
        self._desk = desk
        self._clock = clock
        self._mint = TokenMint(desk.peer_id, desk.run.digest)
        self._allow = limits.allow
        self._contributors = _Rates.of(limits.requests_per_s, limits.bytes_per_s)
        self._relays = _Rates.of(limits.relay_requests_per_s, limits.relay_bytes_per_s)
        self._relays_until_ms: dict[PeerId, int] = {}
        self._uploads = Buckets(Rate.with_burst(limits.upload_bytes_per_s, BYTES_BURST_S))
        self._evicted = Buckets(EVICTED_RATE)
        self._address_requests = Buckets(Rate.with_burst(limits.address_requests_per_s, REQUEST_BURST_S))
        self._address_bytes = Buckets(Rate.with_burst(limits.address_bytes_per_s, BYTES_BURST_S))
        self.budget = DailyBudget(limits.bytes_per_day)
        if (spent := store.document(BUDGET)) is not None:
            self.budget.restore(*msgspec.msgpack.decode(spent, type=tuple[int, int]))
        self.refusals = 0
        """Requests turned away since start."""

    def know_relays(self, valid_until_ms: Mapping[PeerId, int]) -> None:
        """The run's other relays, by their own signed adverts, and when those end. From any thread."""
        self._relays_until_ms = dict(valid_until_ms)

    def routes(self) -> list[web.RouteDef]:
        return [web.post(HELLO, self._hello)]

    @staticmethod
    def peer(request: web.Request) -> PeerId:
        """Whose request it is: proved."""
        return request[_PEER]

    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request through or refuse it. Raises RefusedError, ProtocolError."""
        try:
            self._check(request)
        except RefusedError:
            self.refusals += 1
            raise
        return await handler(request)

    async def on_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        """Charge an answer to whom it is for, before its first byte: who is in debt waits before the next one."""
        size = response.content_length or 0
        self.budget.spend(size)
        self._address_bytes.charge(address_key(request), size)
        if _PEER in request:
            peer = self.peer(request)
            self._rates_of(peer).bytes.charge(peer, size)

    def save_budget(self, store: RelayStore) -> None:
        """Remember what was sent today; blocks on the disk."""
        store.set_document(BUDGET, msgspec.msgpack.encode(self.budget.spent))

    def charge_upload(self, peer: PeerId, size: int) -> None:
        """Charge a file before its first byte. Raises RefusedError while earlier ones are not paid off."""
        if not self._is_staff(peer):
            self._require("bytes handed in", self._uploads.wait_s(peer))
            self._uploads.charge(peer, size)

    def _check(self, request: web.Request) -> None:
        address = address_key(request)
        cost = _COSTS.get(request.path, 1)
        self._take("requests from this address", self._address_requests, address, cost)
        if request.path in OPEN:
            return
        peer = self._mint.holder(request.headers.get("Authorization", ""))
        self._refuse_unlisted(peer)
        self._check_evicted(peer, request)
        if not self._is_staff(peer):
            self._take("requests", self._rates_of(peer).requests, peer, cost)
        if is_bulk(request.path):
            self._check_bulk(peer, address)
        request[_PEER] = peer

    def _check_bulk(self, peer: PeerId, address: str) -> None:
        wait_s = self.budget.wait_s()
        if wait_s:
            raise RefusedError(
                "this relay has sent all that it may send today",
                code="over-budget",
                hint="ask another relay for checkpoints and files until midnight UTC",
                retry_after_s=wait_s,
            )
        self._require("bytes to this address", self._address_bytes.wait_s(address))
        if not self._is_staff(peer):
            self._require("bytes", self._rates_of(peer).bytes.wait_s(peer))

    def _check_evicted(self, peer: PeerId, request: web.Request) -> None:
        """Who is evicted may ask why, and appeal; at a rate, and nothing else."""
        if peer in self._desk.evicted:
            if not asks_why(request, peer):
                self._desk.refuse_evicted(peer)
            self._take("requests of an evicted node", self._evicted, peer, 1)

    def _refuse_unlisted(self, peer: PeerId) -> None:
        if self._allow and peer not in self._allow and not self._is_staff(peer):
            raise RefusedError(
                f"{peer.short} is not on this relay's list",
                code="not-allowed",
                hint=f"ask the relay's operator to add {peer} to `allow`, or use another relay",
            )

    def _is_staff(self, peer: PeerId) -> bool:
        manifest = self._desk.manifest
        if manifest is None:
            return peer == self._desk.run.operator
        return peer == manifest.record.trainer_id or peer in manifest.record.validator_ids

    def _rates_of(self, peer: PeerId) -> _Rates:
        """Anyone may say to be a relay, so that gives no more than the address's own rate."""
        return self._relays if self._relays_until_ms.get(peer, 0) > self._clock() else self._contributors

    def _take(self, what: str, buckets: Buckets, key: PeerId | str, amount: float) -> None:
        self._require(what, buckets.wait_s(key, amount))
        buckets.charge(key, amount)

    def _require(self, what: str, wait_s: float) -> None:
        if wait_s > 0:
            raise RefusedError(
                f"too many {what}",
                code="too-many-requests",
                hint="nothing to do: a node waits as long as it is told",
                retry_after_s=wait_s,
            )

    async def _hello(self, request: web.Request) -> web.Response:
        """A key gets a challenge; its signature under the challenge gets a token."""
        body = await read_body(request, max_bytes=MAX_HELLO_BYTES, timeout_s=HELLO_TIMEOUT_S)
        try:
            said = msgspec.msgpack.decode(body, type=_Said)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MalformedError(f"neither a key nor a hello: {str(error)[:100]}") from error
        if not said.hello:
            self._refuse_unlisted(PeerId(said.key))
            return msgpack_response({"nonce": self._mint.challenge(said.key)})
        peer = self._mint.check_hello(open_envelope(said.hello, Hello))
        self._refuse_unlisted(peer)
        return msgpack_response({"token": self._mint.token(peer), "valid_s": self._mint.token_s})


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    key: bytes = b""
    hello: bytes = b""


def is_bulk(path: str) -> bool:
    """Whether a request is for contents of checkpoints, submissions or the ledger: what a daily budget is for."""
    _, *parts = path.split("/")
    return len(parts) >= 4 and ((parts[1], parts[3]) in _BULK or parts[:3] == _LEDGER_SEGMENT)


def asks_why(request: web.Request, peer: PeerId) -> bool:
    """Whether a request is one of those that an evicted key may make: its own verdicts and standing, and an appeal."""
    if request.path in ("/v1/standing", "/v1/appeals"):
        return True
    query = request.query
    own = query.get("about", "").lower() == peer.public_key.hex()
    return request.path == "/v1/feed" and own and query.get("kinds") == Verdict.KIND


def address_key(request: web.Request) -> str:
    """Whose rate a request counts for: an IPv4 address, or the /64 that an IPv6 address is one of."""
    text = (request.remote or "").partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)
