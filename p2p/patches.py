"""Repairs of libp2p 0.8.1, the release this program is pinned to.

Every use of a private name of libp2p is here, one function a fault, each naming the test that shows the fault gone.
`apply()` checks the release, changes libp2p's modules and classes once per process, and must run before a host is
built. What the library allows to be set in public (security, muxer, watermarks) is in p2p.host.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import trio
from libp2p.host.basic_host import BasicHost
from libp2p.kad_dht import common, kad_dht, peer_routing, provider_store, value_store
from libp2p.network import swarm as swarm_module
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.peerstore import PeerStore
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils import varint

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

LIBP2P_VERSION: Final = "0.8.1"
KAD_PROTOCOL: Final = "/intellect/kad/1.0.0"
MAX_NEGOTIATION_BYTES: Final = 64 * 1024
MAX_UNREAD_BYTES: Final = 16 * 1024 * 1024
MAX_FRAME_BYTES: Final = 1024 * 1024
MAX_KAD_REQUEST_BYTES: Final = 16 * 1024
MAX_PEER_RECORD_BYTES: Final = 2048
MAX_ADDRESSES_PER_PEER: Final = 16
MAX_STREAMS_PER_PEER: Final = 32
MAX_KAD_STREAMS: Final = 64
MAX_KAD_STREAMS_PER_PEER: Final = 4
KAD_STREAM_TIMEOUT_S: Final = 15.0
QUERY_TIMEOUT_S: Final = 3
MAX_HALF_OPEN_PER_ADDRESS: Final = 32
MAX_LOG_CHARACTERS: Final = 2048

_KAD_MODULES: Final = (common, kad_dht, peer_routing, provider_store, value_store)
_applied = False


def apply() -> None:
    """Repair libp2p in this process; later calls do nothing. Raises ConfigError if another release is installed."""
    global _applied
    check_version(importlib.metadata.version("libp2p"))
    if _applied:
        return
    _applied = True
    for repair in _REPAIRS:
        repair()


def check_version(installed: str) -> None:
    """Raise ConfigError unless this is the release that the repairs were written for."""
    if installed != LIBP2P_VERSION:
        raise ConfigError(
            f"libp2p {installed} is installed; the repairs in p2p.patches are for {LIBP2P_VERSION} alone",
            hint=f"pip install 'libp2p=={LIBP2P_VERSION}'",
        )


def contain_stream_handlers() -> None:
    """An exception that leaves a stream handler ends the host, and one peer may open any number of streams.

    Tests: test_raising_handler_ends_its_stream_only, test_streams_of_one_peer_are_capped.
    """
    original = BasicHost._swarm_stream_handler

    async def handle(self: Any, stream: Any) -> None:
        peer = stream.muxed_conn.peer_id
        counts: Counter[Any] = self.__dict__.setdefault("_intellect_streams", Counter())
        if counts[peer] >= MAX_STREAMS_PER_PEER:
            await _reset(stream)
            return
        counts[peer] += 1
        try:
            await original(self, stream)
        except Exception as error:
            log.debug("stream_failed peer=%s error=%s", peer, cut(repr(error)))
            await _reset(stream)
        finally:
            _count_down(counts, peer)

    BasicHost._swarm_stream_handler = handle


def contain_system_tasks() -> None:
    """Identify runs in trio system tasks: an exception there ends the whole program.

    Test: test_identify_failure_is_contained.
    """
    original = BasicHost._identify_task_entry

    async def identify(self: Any, peer_id: Any, reason: str) -> None:
        try:
            await original(self, peer_id, reason)
        except Exception as error:
            log.debug("identify_failed peer=%s error=%s", peer_id, cut(repr(error)))

    BasicHost._identify_task_entry = identify


def return_inbound_slots() -> None:
    """The slot of an inbound connection is given back when the program stops, not when the connection closes.

    After 250 connections in its lifetime a node would accept no more. Sockets that have not finished their handshake
    are counted by address, so that one host cannot hold all slots with idle sockets.
    Tests: test_inbound_slots_are_given_back, test_idle_sockets_do_not_shut_others_out.
    """

    async def serve(self: Any, socket: Any, listen_addr: Any, failure_event: Any) -> None:
        half_open: Counter[str] = self.__dict__.setdefault("_intellect_half_open", Counter())
        remote = str((socket.get_remote_address() or ("unknown",))[0])
        if half_open[remote] >= MAX_HALF_OPEN_PER_ADDRESS:
            await socket.close()
            return
        half_open[remote] += 1
        try:
            muxed = await self.upgrade_inbound_raw_conn(RawConnection(socket, False), listen_addr)
        except Exception as error:
            log.debug("inbound_refused address=%s error=%s", remote, cut(repr(error)))
            await socket.close()
            return
        finally:
            _count_down(half_open, remote)
        await muxed.event_closed.wait()

    Swarm._do_handle_inbound_connection = serve


def cap_negotiation_messages() -> None:
    """The length prefix of protocol negotiation is unlimited, before any authentication.

    Test: test_negotiation_message_does_not_fill_memory.
    """

    async def read(reader: Any) -> bytes:
        data: bytes = await varint.read_varint_prefixed_bytes_limited(reader, MAX_NEGOTIATION_BYTES)
        return data

    varint.read_varint_prefixed_bytes = read


def enforce_receive_window() -> None:
    """A peer that ignores the yamux window can push data into an unread stream without end.

    `handle_incoming` closes the connection on TooSlowError and on nothing else.
    Test: test_unread_stream_does_not_fill_memory.
    """
    original = Yamux._read_data_body

    async def read_body(self: Any, length: int) -> bytes:
        unread = sum(map(len, self.stream_buffers.values()))
        if length > MAX_FRAME_BYTES or unread + length > MAX_UNREAD_BYTES:
            log.warning(
                "peer_dropped peer=%s reason=window unread_bytes=%d frame_bytes=%d", self.peer_id, unread, length
            )
            raise trio.TooSlowError(f"{unread} unread bytes and a frame of {length}")
        data: bytes = await original(self, length)
        return data

    Yamux._read_data_body = read_body


def separate_kad_network() -> None:
    """The Kademlia protocol id is hard-coded to that of IPFS, whose nodes would mix with ours.

    Test: test_kademlia_has_its_own_protocol_id.
    """
    for module in _KAD_MODULES:
        module.PROTOCOL_ID = KAD_PROTOCOL


def bound_kad_messages() -> None:
    """Requests of 4 MiB are read and logged; a peer that says nothing holds a query for 10 s.

    Test: test_oversized_request_is_refused_unread.
    """
    for module in _KAD_MODULES:
        if hasattr(module, "MAX_DHT_MESSAGE_SIZE"):
            module.MAX_DHT_MESSAGE_SIZE = MAX_KAD_REQUEST_BYTES
        if hasattr(module, "QUERY_TIMEOUT"):
            module.QUERY_TIMEOUT = QUERY_TIMEOUT_S


def limit_kad_streams() -> None:
    """Twelve idle streams of one peer stop a DHT server: its handler has no deadline and no cap per peer.

    Test: test_idle_kad_streams_do_not_stop_the_server.
    """

    async def handle(self: Any, stream: Any) -> None:
        peer = stream.muxed_conn.peer_id
        counts: Counter[Any] = self.__dict__.setdefault("_intellect_streams", Counter())
        if counts[peer] >= MAX_KAD_STREAMS_PER_PEER or counts.total() >= MAX_KAD_STREAMS:
            await _reset(stream)
            return
        counts[peer] += 1
        try:
            with trio.move_on_after(KAD_STREAM_TIMEOUT_S) as deadline:
                await self._do_handle_stream(stream)
            if deadline.cancelled_caught:
                await _reset(stream)
        finally:
            _count_down(counts, peer)

    kad_dht.KadDHT.handle_stream = handle


def dial_at_once() -> None:
    """Every dial waits 250 ms for a failure of the first address, also after it has succeeded.

    Test: test_repairs_are_in_place.
    """
    swarm_module._HAPPY_EYEBALLS_DELAY = 0.0


def stop_auto_connector() -> None:
    """The auto connector dials every peer it has heard of until small networks are full meshes.

    Test: test_repairs_are_in_place.
    """

    async def nothing(self: Any) -> None:
        return None

    AutoConnector.maybe_connect = nothing


def bound_peer_store() -> None:
    """A peer store past 1000 entries first evicts the one without addresses: the node's own, with its private key.

    Peers can cause that with one answer full of made-up ids. Their records are bounded too.
    Tests: test_flood_of_peers_leaves_the_own_key, test_huge_peer_record_is_refused.
    """
    enforce, consume, add = PeerStore._enforce_peer_limit, PeerStore.consume_peer_record, PeerStore.add_addrs

    def enforce_limit(self: Any) -> None:
        own = {peer: data for peer, data in self.peer_data_map.items() if data.privkey is not None}
        enforce(self)
        self.peer_data_map.update(own)

    def consume_record(self: Any, envelope: Any, ttl: int) -> bool:
        if len(envelope.marshal_envelope()) > MAX_PEER_RECORD_BYTES:
            return False
        return bool(consume(self, envelope, ttl))

    def add_addresses(self: Any, peer_id: Any, addrs: Any, ttl: int = 0) -> None:
        known = self.peer_data_map.get(peer_id)
        room = MAX_ADDRESSES_PER_PEER - (len(known.get_addrs()) if known else 0)
        add(self, peer_id, list(addrs)[: max(room, 0)], ttl)

    PeerStore._enforce_peer_limit = enforce_limit
    PeerStore.consume_peer_record = consume_record
    PeerStore.add_addrs = add_addresses


def quieten_logs() -> None:
    """libp2p logs what peers send, at length; a bad record of 3 MiB makes a line of 6 MiB.

    Errors are handed on at debug level, cut; less is dropped. Test: test_logs_of_libp2p_are_cut.
    """
    root = logging.getLogger("libp2p")
    root.setLevel(logging.ERROR)
    root.handlers[:] = [_CutAndForward()]
    root.propagate = False
    swarm_connection.logging = logging.getLogger("libp2p.swarm_connection")  # it logs on the root logger
    logging.getLogger("multiaddr").setLevel(logging.WARNING)


class _CutAndForward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("libp2p %s", " ".join(cut(record.getMessage()).split()))


def cut(text: str) -> str:
    """Shorten what a log line quotes from outside."""
    return text if len(text) <= MAX_LOG_CHARACTERS else text[: MAX_LOG_CHARACTERS - 1] + "…"


def forget_failed_dial(host: Any, peer_id: Any) -> None:
    """Let the next dial happen: after a failure libp2p refuses to dial a peer for 60 s, longer than our back-off."""
    host.get_network()._negative_peer_cache.evict(str(peer_id))


def namespaces(dht: Any) -> list[str]:
    """Namespaces that a KadDHT takes values in."""
    return list(dht.validator._validators)


def _count_down(counts: Counter[Any], key: Any) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]


async def _reset(stream: Any) -> None:
    try:
        await stream.reset()
    except Exception as error:
        log.debug("reset_failed error=%s", cut(repr(error)))


_REPAIRS: Final[tuple[Callable[[], None], ...]] = (
    contain_stream_handlers,
    contain_system_tasks,
    return_inbound_slots,
    cap_negotiation_messages,
    enforce_receive_window,
    separate_kad_network,
    bound_kad_messages,
    limit_kad_streams,
    dial_at_once,
    stop_auto_connector,
    bound_peer_store,
    quieten_logs,
)
