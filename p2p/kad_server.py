"""The answering side of Kademlia: libp2p's messages, many a stream, each stream with deadlines and a share.

Written anew because the library's handler has twelve slots for everyone and no deadline, takes whoever asks into its
routing table, keeps what it should refuse, and cannot say who did what. On any error the stream is reset, as the
specification has it, and the peer is scored.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from p2p import patches
from p2p.addresses import parse_addresses
from p2p.dht_records import MAX_KEY_BYTES
from p2p.dht_stores import FullError, ProviderStore, ValueStore
from p2p.framing import FrameError, Frames, OversizedError, StalledError
from p2p.guard import Guard
from p2p.kad_message import KAD_PROTOCOL, MAX_CLOSER_PEERS, MAX_REQUEST_BYTES, name_peer
from p2p.routing import RoutingTable, target_of
from p2p.scores import Misdeed
from p2p.text import cut
from protocol.errors import (
    ClockError,
    NodeError,
    SignatureError,
    StaleRecordError,
    VersionError,
    WrongAuthorError,
    WrongRunError,
)

log = logging.getLogger(__name__)

MAX_STREAMS: Final = 256
MAX_STREAMS_PER_PEER: Final = 8
IDLE_TIMEOUT_S: Final = 30.0
REQUESTS_PER_S: Final = 50.0
REQUEST_BURST: Final = 200.0
_MAX_SENDERS: Final = 1024


class _Unanswerable(Exception):
    """Raised when a request gets no answer; `misdeed` if that is the peer's doing."""

    def __init__(self, why: str, misdeed: Misdeed | None = Misdeed.GARBAGE) -> None:
        super().__init__(why)
        self.misdeed = misdeed


class KadServer:
    """Answers other nodes' requests from this node's table and stores."""

    def __init__(
        self, host: Any, *, table: RoutingTable, values: ValueStore, providers: ProviderStore, guard: Guard
    ) -> None:
        self._host, self._table, self._values, self._providers, self._guard = host, table, values, providers, guard
        self._streams: Counter[Any] = Counter()
        self._waiting: dict[Any, trio.CancelScope] = {}
        self._senders: dict[Any, _Bucket] = {}
        self.answered: Counter[str] = Counter()

    def attach(self) -> None:
        """Begin to answer."""
        self._host.set_stream_handler(KAD_PROTOCOL, self.handle)

    async def handle(self, stream: Any) -> None:
        """Serve one stream until it ends, is idle too long, or breaks a rule. The caller resets it on an exception."""
        peer = stream.muxed_conn.peer_id
        if self._streams[peer] >= MAX_STREAMS_PER_PEER or not self._make_room():
            await self._guard.blame(self._host, stream, Misdeed.FLOOD)
            raise _Unanswerable("too many streams")
        self._streams[peer] += 1
        patches.has_own_deadlines(stream)
        try:
            await self._serve(stream, peer)
        except _Unanswerable as error:
            log.debug("request_refused peer=%s why=%s", peer, cut(str(error)))
            if error.misdeed is not None:
                await self._guard.blame(self._host, stream, error.misdeed)
            raise
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, stream: Any, peer: Any) -> None:
        frames = Frames(stream, max_bytes=MAX_REQUEST_BYTES)
        while (data := await self._next(frames, stream)) is not None:
            if not self._bucket(peer).take():
                raise _Unanswerable("too many requests", Misdeed.FLOOD)
            await frames.send(self._answer(peer, data).SerializeToString())
        await stream.close()

    async def _next(self, frames: Frames, stream: Any) -> bytes | None:
        """The next request. While it has not begun, the stream may be ended to make room for another."""
        with trio.CancelScope() as waiting:
            self._waiting[stream] = waiting
            try:
                return await frames.receive(idle_s=IDLE_TIMEOUT_S)
            except OversizedError as error:
                raise _Unanswerable(str(error), Misdeed.OVERSIZED) from error
            except StalledError as error:
                raise _Unanswerable(str(error), Misdeed.STALL) from error
            except FrameError as error:
                raise _Unanswerable(str(error), None) from error  # it hung up
            finally:
                self._waiting.pop(stream, None)
        return None

    def _make_room(self) -> bool:
        """When all streams are taken, end the one that has waited for a request the longest."""
        if self._streams.total() < MAX_STREAMS:
            return True
        for scope in self._waiting.values():
            if not scope.cancel_called:
                scope.cancel()
                return True
        return False

    def _bucket(self, peer: Any) -> _Bucket:
        bucket = self._senders.pop(peer, None) or _Bucket()
        self._senders[peer] = bucket
        if len(self._senders) > _MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        return bucket

    def _answer(self, peer: Any, data: bytes) -> Any:
        try:
            request = Message.FromString(data)
            kind = Message.MessageType.Name(request.type)
        except (DecodeError, ValueError) as error:
            raise _Unanswerable(f"no request: {error}") from error
        self.answered[kind] += 1
        if kind == "PING":
            return Message(type=request.type)
        if not 0 < len(request.key) <= MAX_KEY_BYTES:
            raise _Unanswerable(f"a key of {len(request.key)} bytes")
        answer = Message(type=request.type, key=request.key)
        getattr(self, f"_{kind.lower()}")(peer, request, answer)
        return answer

    def _find_node(self, peer: Any, request: Any, answer: Any) -> None:
        self._name_closest(peer, request, answer)

    def _get_value(self, peer: Any, request: Any, answer: Any) -> None:
        held = self._values.get(request.key)
        if held is not None:
            answer.record.CopyFrom(held)
        self._name_closest(peer, request, answer)

    def _put_value(self, peer: Any, request: Any, answer: Any) -> None:
        try:
            self._values.put_record(request.key, request.record, sender=peer)
        except (
            ClockError,
            StaleRecordError,
            VersionError,
        ) as error:  # a wrong clock, an old copy, new software: no lie
            raise _Unanswerable(error.message, None) from error
        except FullError as error:
            raise _Unanswerable(str(error), Misdeed.FLOOD) from error
        except (SignatureError, WrongAuthorError, WrongRunError) as error:
            raise _Unanswerable(error.message, Misdeed.FORGED_VALUE) from error
        except NodeError as error:
            raise _Unanswerable(error.message, Misdeed.GARBAGE) from error
        answer.record.CopyFrom(request.record)

    def _add_provider(self, peer: Any, request: Any, answer: Any) -> None:
        """A peer may announce itself alone."""
        own = [proto for proto in request.providerPeers[:4] if ID(bytes(proto.id)) == peer]
        addresses = parse_addresses(own[0].addrs) if own else ()
        if not addresses:
            raise _Unanswerable("announces no address of its own", None)
        self._providers.add_provider(request.key, PeerInfo(peer, list(addresses)))

    def _get_providers(self, peer: Any, request: Any, answer: Any) -> None:
        for info in self._providers.get_providers(request.key):
            name_peer(answer.providerPeers.add(), info.peer_id, info.addrs, self._record_of(info.peer_id))
        self._name_closest(peer, request, answer)

    def _name_closest(self, peer: Any, request: Any, answer: Any) -> None:
        """Only contacts of the table are named: never clients, whose addresses are their own affair."""
        for contact in self._table.closest(target_of(request.key), MAX_CLOSER_PEERS):
            if contact.peer_id != peer:
                name_peer(
                    answer.closerPeers.add(), contact.peer_id, contact.addresses, self._record_of(contact.peer_id)
                )

    def _record_of(self, peer_id: Any) -> bytes:
        return patches.peer_record(self._host, peer_id)


class _Bucket:
    """A token bucket of one sender's requests."""

    def __init__(self) -> None:
        self._tokens, self._at = REQUEST_BURST, trio.current_time()

    def take(self) -> bool:
        now = trio.current_time()
        self._tokens = min(REQUEST_BURST, self._tokens + (now - self._at) * REQUESTS_PER_S)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
