"""A node's libp2p host: TCP, Noise, yamux, and nothing else.

The host's key is the node's identity, so a connection's peer id is proved by its handshake. libp2p's default host also
offers plaintext, with which anyone could pose as anyone. Repairs of the library are in p2p.patches.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from p2p import patches
from protocol.errors import ConfigError, PortError
from protocol.identity import Identity

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256
HANDSHAKE_TIMEOUT_S: Final = 8.0
CLOSE_TIMEOUT_S: Final = 3.0
MAX_ADDRESSES_TO_DIAL: Final = 4
_ANY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
_ANSWERED_AS = re.compile(r"remote_peer_id_from_pubkey=(\w+)")


class DialError(Exception):
    """Raised when no address of a peer led to it. `other_peer` is who answered instead, if someone did."""

    def __init__(self, reason: str, *, other_peer: str = "") -> None:
        super().__init__(reason)
        self.other_peer = other_peer


def build_host(identity: Identity, *, announce: Sequence[Multiaddr] = ()) -> Any:
    """A host that is not running yet. `announce` replaces what peers are told; without it, where the host listens."""
    patches.apply()
    keys = create_new_key_pair(identity.seed)
    fixed = list(announce)
    host = new_host(
        key_pair=keys,
        sec_opt={NOISE_PROTOCOL: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)},
        muxer_opt={YAMUX_PROTOCOL: Yamux},
        connection_config=_connection_config(),
        addrs_factory=lambda listening: fixed or [address for own in listening for address in reachable(own)],
        disable_identify_address_discovery=True,
    )
    host.get_network().retry_config = RetryConfig(max_retries=0)
    return host


def _connection_config() -> Any:
    return ConnectionConfig(
        max_connections=MAX_CONNECTIONS,
        high_watermark=MAX_CONNECTIONS - 16,
        min_connections=0,
        low_watermark=0,
        dial_timeout=HANDSHAKE_TIMEOUT_S,
        inbound_upgrade_timeout=HANDSHAKE_TIMEOUT_S,
        outbound_upgrade_timeout=HANDSHAKE_TIMEOUT_S,
        outbound_stream_protocol_negotiation_timeout=HANDSHAKE_TIMEOUT_S,
        inbound_stream_protocol_negotiation_timeout=HANDSHAKE_TIMEOUT_S,
    )


@asynccontextmanager
async def running(host: Any, listen: Sequence[Multiaddr]) -> AsyncIterator[None]:
    """Run a host; on the way out close its connections, also when cancelled. Raises PortError."""
    for address in listen:
        probe_port(address)
    async with trio.open_nursery() as nursery:
        leave = trio.Event()
        await nursery.start(_serve, host, listen, leave)
        try:
            yield
        finally:
            leave.set()


async def _serve(host: Any, listen: Sequence[Multiaddr], leave: trio.Event, *, task_status: Any) -> None:
    """Keep a host running until `leave`. Shielded: a host that is cancelled leaves its sockets open."""
    with trio.CancelScope(shield=True) as scope:
        async with host.run(list(listen)):
            if len(host.get_network().listeners) < len(listen):
                raise PortError(f"cannot listen on {_join(listen)}", hint="choose another --listen address")
            task_status.started()
            await leave.wait()
            scope.deadline = trio.current_time() + CLOSE_TIMEOUT_S
            await _close_connections(host)
            await host.close()


async def _close_connections(host: Any) -> None:
    async with trio.open_nursery() as nursery:  # each takes 0.2 s
        for connection in host.get_network().get_connections():
            nursery.start_soon(connection.close)


async def dial(host: Any, peer_id: Any, addresses: Sequence[Multiaddr], *, timeout_s: float) -> None:
    """Connect to a peer at one of its addresses, one after another. Raises DialError.

    libp2p itself would try a single TCP address, so that one wrong address, told by anyone, hides the right ones.
    """
    if host.get_network().get_connections(peer_id):
        return
    failure = DialError("no address of it is known")
    for address in list(addresses)[:MAX_ADDRESSES_TO_DIAL]:
        try:
            with trio.fail_after(timeout_s):
                await _dial_one(host, peer_id, address)
            return
        except trio.TooSlowError:
            failure = DialError(f"{address} did not answer within {timeout_s:g} s")
        except Exception as error:  # whatever a peer's bytes bring about
            failure = _dial_error(address, error)
    raise failure


async def _dial_one(host: Any, peer_id: Any, address: Multiaddr) -> None:
    patches.forget_failed_dial(host, peer_id)
    host.get_peerstore().clear_addrs(peer_id)
    await host.connect(PeerInfo(peer_id, [address]))


def _dial_error(address: Multiaddr, error: BaseException) -> DialError:
    causes = list(_causes(error))
    for cause in causes:
        if match := _ANSWERED_AS.search(str(cause)):
            return DialError(f"{address} answers as {match[1]}", other_peer=match[1])
    root = next((cause for cause in causes if isinstance(cause, OSError)), causes[-1])
    return DialError(f"{address}: {patches.cut(str(root) or repr(root))}")


def _causes(error: BaseException, depth: int = 0) -> Iterator[BaseException]:
    yield error
    if depth > 10:
        return
    inner = error.__cause__ or error.__context__
    nested = getattr(error, "errors", None) or getattr(error, "exceptions", None) or ()
    for cause in (*nested, *([inner] if inner else [])):
        yield from _causes(cause, depth + 1)


def probe_port(address: Multiaddr) -> None:
    """Raise PortError if an address cannot be listened on.

    libp2p listens with SO_REUSEPORT: a second node on the same port would start without an error and share its
    connections with the first.
    """
    host, port = endpoint(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise _port_error(address, port, error) from error


def _port_error(address: Multiaddr, port: int, error: OSError) -> PortError:
    message = f"cannot listen on {address}: {os.strerror(error.errno or 0)}"
    if error.errno == errno.EADDRINUSE:
        return PortError(
            f"{message}; another program has port {port}, maybe another node",
            hint=f"see who has it with `ss -ltnp 'sport = :{port}'`, or choose another port with --listen",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PortError(f"{message}; ports below 1024 are for root", hint="choose a port above 1023 with --listen")
    return PortError(f"{message}; no interface has that address", hint="use --listen /ip4/0.0.0.0/tcp/<port>")


def parse_listen(text: str) -> Multiaddr:
    """Read an address to listen on. Raises ConfigError."""
    address = _parse(text, option="--listen", example="/ip4/0.0.0.0/tcp/4001")
    endpoint(address)
    return address


def parse_announce(text: str) -> Multiaddr:
    """Read an address to tell others, which must lead somewhere from outside. Raises ConfigError."""
    example = "/ip4/203.0.113.7/tcp/4001"
    address = _parse(text, option="--announce", example=example)
    names = [protocol.name for protocol in address.protocols()]
    value = address.value_for_protocol(names[0])
    if value in _ANY_ADDRESS or address.value_for_protocol("tcp") == "0":
        raise ConfigError(f"nobody can dial {text}", hint=f"announce a real address and port: --announce {example}")
    return address


def _parse(text: str, *, option: str, example: str) -> Multiaddr:
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except Exception as error:  # multiaddr raises whatever its codecs raise
        raise ConfigError(f"not a multiaddr: {text[:120]!r}", hint=f"write {option} {example}") from error
    if names[:2] not in (["ip4", "tcp"], ["ip6", "tcp"], ["dns4", "tcp"], ["dns6", "tcp"], ["dns", "tcp"]):
        raise ConfigError(f"not a TCP address: {text[:120]!r}", hint=f"write {option} {example}")
    return address


def endpoint(address: Multiaddr) -> tuple[str, int]:
    """IP address and TCP port of an address to listen on. Raises ConfigError for names."""
    name = address.protocols()[0].name
    if name not in ("ip4", "ip6"):
        raise ConfigError(f"cannot listen on a name: {address}", hint="write --listen /ip4/0.0.0.0/tcp/<port>")
    return str(address.value_for_protocol(name)), int(address.value_for_protocol("tcp"))


def reachable(address: Multiaddr) -> list[Multiaddr]:
    """What to announce for an address that is listened on: for all interfaces, the one that leads out."""
    host, port = endpoint(address)
    if port == 0:
        return []
    if host not in _ANY_ADDRESS:
        return [address]
    outward = outward_address(ipv6=":" in host)
    version = ipaddress.ip_address(outward).version
    return [Multiaddr(f"/ip{version}/{outward}/tcp/{port}")]


def outward_address(*, ipv6: bool) -> str:
    """The address from which this machine would reach the internet; loopback if it could not. Sends nothing."""
    family, target = (socket.AF_INET6, "2001:db8::1") if ipv6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return "::1" if ipv6 else "127.0.0.1"
        return str(probe.getsockname()[0]).partition("%")[0]


def to_libp2p(peer_id: object) -> Any:
    """A protocol.identity.PeerId as libp2p's own type."""
    return ID.from_string(str(peer_id))


def _join(addresses: Sequence[Multiaddr]) -> str:
    return ", ".join(map(str, addresses))
