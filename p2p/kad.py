"""The asking side of Kademlia: one request to one peer, and the walk towards the peers closest to a key.

Written anew over libp2p's wire format, because the library's own client trusts its local copies, hides whether a put
was stored, takes whom it is told about into its routing table unasked, and waits 10 s for the silent. Kademlia: A
Peer-to-peer Information System Based on the XOR Metric, sections 2.2 and 2.3.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.host.exceptions import StreamFailure
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.envelope import consume_envelope
from libp2p.peer.peerstore import PeerStoreError

from p2p.addresses import Scope, is_dialable, remote_ip, scope_of, scope_of_ip
from p2p.framing import FrameError, Frames, OversizedError
from p2p.guard import Guard, hang_up
from p2p.host import DialError, dial
from p2p.kad_message import KAD_PROTOCOL, MAX_ADDRESSES, MAX_ANSWER_BYTES, Known
from p2p.patches import guard_of
from p2p.routing import key_of, target_of
from p2p.scores import Misdeed
from p2p.text import cut

log = logging.getLogger(__name__)

REPLICAS: Final = 8
"""Peers closest to a key that hold its value."""
PARALLEL_REQUESTS: Final = 4
MAX_VISITS: Final = 32
"""Most peers that one walk asks, however many it is told about."""
REQUEST_TIMEOUT_S: Final = 3.0
STREAM_IDLE_S: Final = 15.0
"""How long a stream is kept for the next request; less than servers keep it."""
MAX_STREAMS_TO_A_PEER: Final = 4
FIRST_PAUSE_S: Final = 10.0
MAX_PAUSE_S: Final = 300.0
_MAX_PAUSED: Final = 2048
_MAX_POOL: Final = 512


class RequestError(Exception):
    """Raised when a peer did not answer a request, or answered nonsense."""


class ForeignPeer(RequestError):
    """Raised when a peer does not speak this network's Kademlia."""


class RefusedRequest(RequestError):
    """Raised when a peer that is there ended the stream instead of answering."""


@dataclass
class _Pause:
    """A peer that did not answer is left alone for a while, longer each time."""

    until: float = 0.0
    times: int = 0


class Asker:
    """Sends requests to peers over streams that are used again, and leaves the silent alone for a while."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._guard: Guard = guard_of(host)
        self._idle: dict[Any, list[tuple[Any, float]]] = {}
        self._limits: dict[Any, trio.CapacityLimiter] = {}
        self._pauses: dict[Any, _Pause] = {}
        self.sent: Counter[str] = Counter()

    def is_paused(self, peer_id: Any) -> bool:
        """Whether a peer failed so recently that asking it again would only cost time."""
        pause = self._pauses.get(peer_id)
        return pause is not None and pause.until > trio.current_time()

    async def request(self, known: Known, message: Any) -> Any:
        """Send one message and return its answer, within REQUEST_TIMEOUT_S. Raises RequestError."""
        if self._guard.scores.is_banned(known.peer_id):
            raise RequestError("it is banned")
        self.sent[Message.MessageType.Name(message.type)] += 1
        limit = self._limits.setdefault(known.peer_id, trio.CapacityLimiter(MAX_STREAMS_TO_A_PEER))
        try:
            with trio.fail_after(REQUEST_TIMEOUT_S):
                async with limit:
                    answer = await self._exchange(known, message)
        except trio.TooSlowError:
            self._pause(known.peer_id)
            # One that froze keeps its sockets, and would look connected for ever.
            await hang_up(self._host, known.peer_id)
            raise RequestError(f"no answer within {REQUEST_TIMEOUT_S:g} s") from None
        except DialError as error:
            self._pause(known.peer_id)
            raise RequestError(str(error)) from None
        except (OversizedError, DecodeError) as error:
            await self._blame(known.peer_id)
            raise RequestError(f"answered with nonsense: {error}") from error
        except FrameError as error:
            raise RequestError(str(error)) from error
        except RequestError:
            raise
        except StreamFailure as error:
            foreign = "not supported" in str(error.__cause__)
            raise (ForeignPeer if foreign else RequestError)(cut(str(error.__cause__ or error))) from error
        except Exception as error:  # libp2p raises what a peer's bytes bring about: its fault ends its request only
            raise RequestError(cut(repr(error))) from error
        finally:
            self._tidy(known.peer_id, limit)
        self._pauses.pop(known.peer_id, None)
        return answer

    def forgive(self) -> None:
        """Ask everyone again: this node's own network was away, not they."""
        self._pauses.clear()

    def scope_of(self, peer_id: Any) -> Scope:
        """How far the address leads at which a connected peer was reached."""
        ip = self.ip_of(peer_id)
        return Scope.LOOPBACK if ip is None else scope_of_ip(ip)

    def ip_of(self, peer_id: Any) -> str | None:
        connections = self._host.get_network().get_connections(peer_id)
        return remote_ip(connections[0]) if connections else None

    def close_idle(self) -> list[Any]:
        """Forget streams that have not been used for a while; return them, to be closed."""
        now, old = trio.current_time(), []
        for peer_id, held in list(self._idle.items()):
            old += [stream for stream, since in held if now - since >= STREAM_IDLE_S]
            self._idle[peer_id] = [(stream, since) for stream, since in held if now - since < STREAM_IDLE_S]
            if not self._idle[peer_id]:
                del self._idle[peer_id]
        return old

    async def _exchange(self, known: Known, message: Any) -> Any:
        data = message.SerializeToString()
        kept = self._kept_stream(known.peer_id)
        answer = await self._try_stream(kept, data) if kept is not None else None
        if answer is None:
            await dial(self._host, known.peer_id, addresses_of(self._host, known), timeout_s=REQUEST_TIMEOUT_S)
            kept = await self._host.new_stream(known.peer_id, [KAD_PROTOCOL])
            answer = await self._try_stream(kept, data)
        if answer is None:
            raise RefusedRequest("it ended the stream instead of answering")
        parsed = Message.FromString(answer)
        if parsed.type != message.type:
            await self._blame(known.peer_id)
            raise RequestError(f"answered {message.type} with {parsed.type}")
        self._idle.setdefault(known.peer_id, []).append((kept, trio.current_time()))
        return parsed

    async def _try_stream(self, stream: Any, data: bytes) -> bytes | None:
        """The answer that comes over a stream; None if it ends without one."""
        frames = Frames(stream, max_bytes=MAX_ANSWER_BYTES)
        try:
            await frames.send(data)
            answer = await frames.receive(idle_s=REQUEST_TIMEOUT_S)
        except FrameError:
            await _reset(stream)
            raise
        except Exception as error:  # whatever libp2p raises for a stream that is gone
            log.debug("stream_gone error=%s", cut(repr(error)))
            answer = None
        except BaseException:
            await _reset(stream)
            raise
        if answer is None:
            await _reset(stream)
        return answer

    def _kept_stream(self, peer_id: Any) -> Any | None:
        held = self._idle.get(peer_id, [])
        while held:
            stream, since = held.pop()
            if trio.current_time() - since < STREAM_IDLE_S and not stream.muxed_conn.is_closed:
                return stream
        self._idle.pop(peer_id, None)
        return None

    def _pause(self, peer_id: Any) -> None:
        pause = self._pauses.pop(peer_id, None) or _Pause()
        pause.times += 1
        pause.until = trio.current_time() + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(pause.times - 1, 10))
        self._pauses[peer_id] = pause
        if len(self._pauses) > _MAX_PAUSED:
            del self._pauses[next(iter(self._pauses))]

    async def _blame(self, peer_id: Any) -> None:
        for connection in self._host.get_network().get_connections(peer_id)[:1]:
            await self._guard.blame(self._host, connection, Misdeed.BAD_ANSWER)

    def _tidy(self, peer_id: Any, limit: trio.CapacityLimiter) -> None:
        if not limit.borrowed_tokens and not limit.statistics().tasks_waiting:
            self._limits.pop(peer_id, None)


async def _reset(stream: Any) -> None:
    with trio.move_on_after(0.5, shield=True):
        try:
            await stream.reset()
        except Exception as error:
            log.debug("reset_failed error=%s", cut(repr(error)))


def addresses_of(host: Any, known: Known) -> list[Any]:
    """Addresses to dial a peer at: those it signed, those that led to it before, then those that others told."""
    try:
        before = list(host.get_peerstore().addrs(known.peer_id))
    except PeerStoreError:
        before = []
    told = list(known.addresses)
    least = min(map(scope_of, told), default=Scope.LOOPBACK)
    signed = [address for address in signed_addresses(known) if scope_of(address) >= least]
    return [address for address in dict.fromkeys([*signed, *before, *told]) if is_dialable(address)]


def signed_addresses(known: Known) -> list[Any]:
    """The addresses in a peer's own record; none if it has not signed it."""
    if not known.record:
        return []
    try:
        _, record = consume_envelope(known.record, "libp2p-peer-record")
        return list(record.addrs)[:MAX_ADDRESSES] if record.peer_id == known.peer_id else []
    except Exception as error:  # libp2p raises whatever its decoders raise
        log.debug("bad_peer_record peer=%s error=%s", known.peer_id, cut(repr(error)))
        return []


def distance(peer_id: Any, target: bytes) -> int:
    """XOR distance of a peer to a hashed key, as libp2p's routing tables have it."""
    return key_of(peer_id) ^ int.from_bytes(target, "big")


@dataclass
class Walk:
    """Ask the peers closest to a key, learning of closer ones from each answer.

    `ask` gets a Known and returns the peers it named; it raises RequestError when the peer is of no use. The walk ends
    when the `width` closest of those that answer have been asked, at MAX_VISITS, or when `enough` says so. Only a wide
    walk sees past made-up peers around a key: a narrow one asks nobody else once they are the closest.
    """

    key: bytes
    ask: Callable[[Known], Awaitable[list[Known]]]
    enough: Callable[[], bool] = lambda: False
    width: int = REPLICAS
    usable: Callable[[Known], bool] = lambda known: True
    answered: list[Any] = field(default_factory=list)
    _pool: dict[Any, Known] = field(default_factory=dict)
    _distance: dict[Any, int] = field(default_factory=dict)
    _asked: set[Any] = field(default_factory=set)
    _failed: set[Any] = field(default_factory=set)

    async def run(self, seeds: Iterable[Known]) -> list[Any]:
        """Return the ids of the peers that answered, closest first."""
        self._target = target_of(self.key)
        self._add(seeds)
        while (batch := self._next()) and not self.enough():
            async with trio.open_nursery() as nursery:
                for known in batch:
                    self._asked.add(known.peer_id)
                    nursery.start_soon(self._visit, known, nursery.cancel_scope)
        return sorted(self.answered, key=self._distance.__getitem__)

    def _add(self, found: Iterable[Known]) -> None:
        for known in found:
            held = self._pool.get(known.peer_id)
            if held is not None:
                self._pool[known.peer_id] = merged(held, known)
            elif len(self._pool) < _MAX_POOL and self.usable(known):
                self._pool[known.peer_id] = known
                self._distance[known.peer_id] = key_of(known.peer_id) ^ self._target

    def _next(self) -> list[Known]:
        alive = sorted((peer for peer in self._pool if peer not in self._failed), key=self._distance.__getitem__)
        room = min(PARALLEL_REQUESTS, MAX_VISITS - len(self._asked))
        return [self._pool[peer] for peer in alive[: self.width] if peer not in self._asked][: max(room, 0)]

    async def _visit(self, known: Known, batch: trio.CancelScope) -> None:
        try:
            found = await self.ask(known)
        except RequestError as error:
            log.debug("request_failed peer=%s error=%s", known.peer_id, error)
            self._failed.add(known.peer_id)
            return
        self.answered.append(known.peer_id)
        self._add(found)
        if self.enough():
            batch.cancel()


def merged(one: Known, other: Known) -> Known:
    """What two peers say about a third: neither can hide its addresses by naming wrong ones first."""
    addresses = dict.fromkeys([*one.addresses[:MAX_ADDRESSES], *other.addresses[:MAX_ADDRESSES]])
    return Known(one.peer_id, tuple(addresses)[: 2 * MAX_ADDRESSES], one.record or other.record)
