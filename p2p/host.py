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
from enum import Enum
from typing import Any, Final

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from p2p import patches
from p2p.addresses import ANY_ADDRESS
from p2p.guard import Guard
from p2p.patches import guard_of
from p2p.text import cut
from protocol.errors import ConfigError, PortError
from protocol.identity import Identity

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
MAX_CONNECTIONS_PER_PEER: Final = 8
MAX_STREAMS: Final = 8192
HANDSHAKE_TIMEOUT_S: Final = 8.0
CLOSE_TIMEOUT_S: Final = 3.0
MAX_ADDRESSES_TO_DIAL: Final = 4
_NAME_FAMILIES: Final = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
_ANSWERED_AS = re.compile(r"remote_peer_id_from_pubkey=(\w+)")


class DialProblem(Enum):
    """Why a peer could not be reached, and what whoever gave its address should do."""

    NO_ADDRESS = "ask for an address of it"
    NAME = "check the spelling of the name and this computer's DNS: `getent hosts <name>`"
    REFUSED = "the computer is up but nothing listens there: check the port, or start the node there"
    FILTERED = "no answer at all: check the address, and that its firewall and router let the TCP port through"
    UNREACHABLE = "this computer has no route there: check its own network, and IPv6 if the address is one"
    LOCAL = "this computer did not allow it: check its limit of open files (`ulimit -n`) and its own firewall"
    OTHER_PEER = "its key has changed, or another node is there: ask for its new address"
    HUNG_UP = "a node that is full or has banned this one does so: wait; if it goes on, check the port"
    NOT_A_NODE = "something else listens there: check the port, which is the DHT's, not the HTTP server's"
    BANNED = "it broke the protocol; see `intellect-node peers`, or delete bans.json and start again"


class DialError(Exception):
    """Raised when no address of a peer led to it: `reason` is what happened at the last one, `address`.

    Written in this program's words: what libp2p raises says what a decoder met, and quotes the other side's bytes.
    `other_peer` is who answered instead, if someone did.
    """

    def __init__(
        self, reason: str, problem: DialProblem, *, address: Multiaddr | None = None, other_peer: str = ""
    ) -> None:
        super().__init__(reason if address is None else f"{address}: {reason}")
        self.reason = reason
        self.problem = problem
        self.other_peer = other_peer


def build_host(identity: Identity, *, announce: Sequence[Multiaddr] = (), guard: Guard | None = None) -> Any:
    """A host that is not running yet. `announce` replaces what peers are told; without it, where the host listens."""
    patches.apply()
    keys = create_new_key_pair(identity.seed)
    fixed = list(announce)
    host = new_host(
        key_pair=keys,
        sec_opt={NOISE_PROTOCOL: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)},
        muxer_opt={YAMUX_PROTOCOL: Yamux},
        connection_config=_connection_config(),
        resource_manager=_resource_manager(),
        addrs_factory=lambda listening: fixed or [address for own in listening for address in reachable(own)],
        disable_identify_address_discovery=True,
    )
    host.get_network().retry_config = RetryConfig(max_retries=0)
    patches.set_guard(host, guard or Guard())
    return host


def _resource_manager() -> Any:
    """Limits by number alone, beside those of p2p.guard.

    By default libp2p also refuses everyone for a minute after five refusals (a circuit breaker that any peer can trip),
    takes 256 inbound connections whatever is configured, and looks at the memory of the whole machine.
    """
    return ResourceManager(
        limits=ResourceLimits(max_connections=MAX_CONNECTIONS, max_streams=MAX_STREAMS),
        connection_limits=ConnectionLimits(
            max_established_inbound=MAX_CONNECTIONS,
            max_established_outbound=MAX_CONNECTIONS,
            max_established_per_peer=MAX_CONNECTIONS_PER_PEER,
            max_established_total=MAX_CONNECTIONS,
        ),
        enable_metrics=False,
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
        enable_rate_limiting=False,
    )


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
    if guard_of(host).scores.is_banned(peer_id):
        raise DialError(f"{peer_id} is banned here", DialProblem.BANNED)
    failure = DialError("no address of it is known", DialProblem.NO_ADDRESS)
    for address in list(addresses)[:MAX_ADDRESSES_TO_DIAL]:
        await guard_of(host).dials.wait()
        try:
            with trio.fail_after(timeout_s):
                await _dial_one(host, peer_id, await resolved(address))
            return
        except trio.TooSlowError:
            failure = DialError(f"did not answer within {timeout_s:g} s", DialProblem.FILTERED, address=address)
        except DialError as error:
            failure = error
        except Exception as error:  # whatever a peer's bytes bring about
            failure = _dial_error(address, error)
    raise failure


async def resolved(address: Multiaddr) -> Multiaddr:
    """An address with its name replaced by an IP address that the name has. Raises DialError."""
    protocol = address.protocols()[0].name
    if protocol not in _NAME_FAMILIES:
        return address
    name, port = address.value_for_protocol(protocol), address.value_for_protocol("tcp")
    try:
        found = await trio.socket.getaddrinfo(name, int(port), _NAME_FAMILIES[protocol], socket.SOCK_STREAM)
    except OSError as error:
        reason = f"the name {name} cannot be resolved: {error.strerror or error}"
        raise DialError(reason, DialProblem.NAME, address=address) from error
    ip = str(found[0][4][0])
    return Multiaddr(f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}")


async def _dial_one(host: Any, peer_id: Any, address: Multiaddr) -> None:
    patches.forget_failed_dial(host, peer_id)
    host.get_peerstore().clear_addrs(peer_id)
    await host.connect(PeerInfo(peer_id, [address]))


def _dial_error(address: Multiaddr, error: BaseException) -> DialError:
    causes = list(_causes(error))
    with_number = (cause for cause in causes if isinstance(cause, OSError) and cause.errno)
    root = next(with_number, causes[-1])
    log.debug("dial_failed address=%s error=%s", address, cut(repr(root)))
    for cause in causes:
        if match := _ANSWERED_AS.search(str(cause)):
            return DialError(f"answers as {match[1]}", DialProblem.OTHER_PEER, address=address, other_peer=match[1])
    problem = _problem(root)
    return DialError(_reason(problem, root), problem, address=address)


def _problem(error: BaseException) -> DialProblem:
    match error:
        case ConnectionRefusedError():
            return DialProblem.REFUSED
        case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH | errno.EADDRNOTAVAIL):
            return DialProblem.UNREACHABLE
        case OSError(errno=errno.ETIMEDOUT):
            return DialProblem.FILTERED
        case ConnectionError() | ConnectionClosedError() | trio.BrokenResourceError():
            return DialProblem.HUNG_UP
        case IncompleteReadError() if "Stream ended" in str(error):  # before a byte of an answer
            return DialProblem.HUNG_UP
        case OSError():
            return DialProblem.LOCAL
        case _:
            return DialProblem.NOT_A_NODE


def _reason(problem: DialProblem, error: BaseException) -> str:
    match problem:
        case DialProblem.REFUSED:
            return "refused the connection"
        case DialProblem.HUNG_UP:
            return "hung up before the handshake was done"
        case DialProblem.NOT_A_NODE:
            return "answers, but not in libp2p's protocol"
        case _:
            number = error.errno if isinstance(error, OSError) else None
            return f"cannot be dialled: {os.strerror(number or 0)}"


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
    if value in ANY_ADDRESS or address.value_for_protocol("tcp") == "0":
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
    if host not in ANY_ADDRESS:
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
