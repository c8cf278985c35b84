"""Repairs of libp2p 0.8.1, the release this program is pinned to.

Every use of a private name of libp2p is here, one function a fault, each naming the test that shows the fault gone.
`apply()` checks the release, changes libp2p's modules and classes once per process, and must run before a host is
built. What the library allows to be set in public (security, muxer, watermarks) is in p2p.host.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio
from libp2p.host.basic_host import BasicHost
from libp2p.io.trio import TrioTCPStream
from libp2p.network import swarm as swarm_module
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.peerstore import PeerStore
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils import varint

from p2p.addresses import remote_ip
from p2p.guard import Guard, Refused
from p2p.scores import Misdeed
from p2p.text import cut
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

LIBP2P_VERSION: Final = "0.8.1"
MAX_NEGOTIATION_BYTES: Final = 64 * 1024
MAX_UNREAD_BYTES: Final = 16 * 1024 * 1024
MAX_FRAME_BYTES: Final = 1024 * 1024
MAX_PEER_RECORD_BYTES: Final = 2048
MAX_ADDRESSES_PER_PEER: Final = 16
STREAM_TIMEOUT_S: Final = 30.0
"""Of a stream that somebody else opened, unless its handler has deadlines of its own."""
_OWN_DEADLINES: Final = "_intellect_own_deadlines"
_GUARD: Final = "_intellect_guard"

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

    A stream of which nothing comes would be held for ever: each has a deadline, negotiation included.
    Tests: test_raising_handler_ends_its_stream_only, test_streams_of_one_peer_are_capped, test_silent_stream_is_ended.
    """
    original = BasicHost._swarm_stream_handler

    async def handle(self: Any, stream: Any) -> None:
        guard = guard_of(self)
        peer = stream.muxed_conn.peer_id
        try:
            with guard.stream(peer, remote_ip(stream)), trio.CancelScope() as scope:
                scope.deadline = trio.current_time() + STREAM_TIMEOUT_S
                setattr(stream, _OWN_DEADLINES, scope)
                await original(self, stream)
            if not scope.cancelled_caught:
                return
            await guard.blame(self, stream, Misdeed.STALL)
        except Refused:
            await guard.blame(self, stream, Misdeed.FLOOD)
        except Exception as error:
            log.debug("stream_failed peer=%s error=%s", peer, cut(repr(error)))
        await _reset(stream)

    BasicHost._swarm_stream_handler = handle


def has_own_deadlines(stream: Any) -> None:
    """Called by a handler that bounds each of its waits itself: the stream may then last as long as it is used."""
    scope = getattr(stream, _OWN_DEADLINES, None)
    if scope is not None:
        scope.deadline = math.inf


def guard_of(host: Any) -> Guard:
    """The guard at a host's door; one of its own if it was given none."""
    guard: Guard = host.__dict__.setdefault(_GUARD, Guard())
    return guard


def set_guard(host: Any, guard: Guard) -> None:
    """Put a guard at a host's door."""
    setattr(host, _GUARD, guard)
    setattr(host.get_network(), _GUARD, guard)


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

    After 250 connections in its lifetime a node would accept no more. Here too: the shares of addresses, so that one
    host cannot hold all slots with idle sockets, and the refusal of who is banned.
    Tests: test_inbound_slots_are_given_back, test_idle_sockets_do_not_shut_others_out, test_banned_peer_is_refused.
    """

    async def serve(self: Any, socket: Any, listen_addr: Any, failure_event: Any) -> None:
        guard = guard_of(self)
        remote = socket.get_remote_address()
        if remote is None:  # it has hung up already
            await socket.close()
            return
        ip = str(remote[0]).partition("%")[0]
        try:
            with guard.handshake(ip) as half_open, _noticing(socket, half_open.note):
                muxed = await self.upgrade_inbound_raw_conn(RawConnection(socket, False), listen_addr)
        except Exception as error:
            log.debug("inbound_refused address=%s error=%s", ip, cut(repr(error)))
            await socket.close()
            return
        try:
            with guard.connection(muxed.peer_id, ip):
                await muxed.event_closed.wait()
        except Refused as error:
            log.debug("inbound_refused address=%s error=%s", ip, error)
            await muxed.close()

    Swarm._do_handle_inbound_connection = serve


@contextmanager
def _noticing(socket: Any, heard: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever something comes in, for the length of a block."""
    read = socket.read

    async def read_and_notice(n: int | None = None) -> bytes:
        data: bytes = await read(n)
        heard()
        return data

    socket.read = read_and_notice
    try:
        yield
    finally:
        del socket.read


def know_ipv6_addresses() -> None:
    """The address at the other end of an IPv6 connection is taken for unknown: it has four parts, not two.

    Shares of neighbourhoods and dialling back need it. Test: test_ipv6_peers_are_known_by_their_address.
    """

    def get_remote_address(self: Any) -> tuple[str, int] | None:
        if self._cached_remote_address is None:
            try:
                self._cached_remote_address = self.stream.socket.getpeername()[:2]
            except OSError as error:
                log.debug("no_remote_address error=%s", error)
        address: tuple[str, int] | None = self._cached_remote_address
        return address

    TrioTCPStream.get_remote_address = get_remote_address


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
            guard_of(getattr(self, "swarm", self)).scores.blame(self.peer_id, Misdeed.WINDOW, ip=remote_ip(self))
            raise trio.TooSlowError(f"{unread} unread bytes and a frame of {length}")
        data: bytes = await original(self, length)
        return data

    Yamux._read_data_body = read_body


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


def forget_failed_dial(host: Any, peer_id: Any) -> None:
    """Let the next dial happen: after a failure libp2p refuses to dial a peer for 60 s, longer than our back-off."""
    host.get_network()._negative_peer_cache.evict(str(peer_id))


def peer_record(host: Any, peer_id: Any) -> bytes:
    """The record in which a peer signed its addresses, as it goes into messages; empty if it is not known."""
    envelope = host.get_peerstore().get_peer_record(peer_id)
    if envelope is None:
        return b""
    marshalled = envelope.__dict__.get("_intellect_bytes")
    if marshalled is None:
        marshalled = envelope.__dict__["_intellect_bytes"] = envelope.marshal_envelope()
    return marshalled if len(marshalled) <= MAX_PEER_RECORD_BYTES else b""


async def _reset(stream: Any) -> None:
    try:
        await stream.reset()
    except Exception as error:
        log.debug("reset_failed error=%s", cut(repr(error)))


_REPAIRS: Final[tuple[Callable[[], None], ...]] = (
    contain_stream_handlers,
    contain_system_tasks,
    return_inbound_slots,
    know_ipv6_addresses,
    cap_negotiation_messages,
    enforce_receive_window,
    dial_at_once,
    stop_auto_connector,
    bound_peer_store,
    quieten_logs,
)
