"""What an address says of the peer behind it: how far it leads, and which neighbourhood it lies in.

Addresses here are multiaddrs or the IP texts of sockets. Names are left alone: they are resolved when they are dialled.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final

from multiaddr import Multiaddr

from p2p.text import cut

log = logging.getLogger(__name__)

MAX_ADDRESS_BYTES: Final = 256
ANY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
_NAMES: Final = ("dns", "dns4", "dns6")


class Scope(IntEnum):
    """From how far away an address can be reached."""

    LOOPBACK = 0
    PRIVATE = 1
    GLOBAL = 2


def scope_of_ip(text: str) -> Scope:
    """Scope of an IP address. Link-local, shared and documentation ranges count as private."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_loopback or address.is_unspecified:
        return Scope.LOOPBACK
    return Scope.GLOBAL if address.is_global and not address.is_multicast else Scope.PRIVATE


def ip_of(address: Any) -> str | None:
    """The IP address in a multiaddr; None for names and whatever else there is."""
    first = next(iter(address.protocols()), None)
    if first is None or first.name not in ("ip4", "ip6"):
        return None
    return str(address.value_for_protocol(first.name))


def scope_of(address: Any) -> Scope:
    """Scope of a multiaddr; names are taken for global."""
    text = ip_of(address)
    return Scope.GLOBAL if text is None else scope_of_ip(text)


def neighbourhood(text: str) -> str:
    """The /24 or /64 that an IP address lies in: what one operator gets many addresses of."""
    address = ipaddress.ip_address(text.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ipaddress.ip_network(f"{address}/{24 if address.version == 4 else 64}", strict=False))


def remote_ip(connection: Any) -> str | None:
    """The IP address at the other end of a connection (a muxed one, a stream's, or a host's), if it is known."""
    muxed = getattr(connection, "muxed_conn", connection)
    remote = muxed.get_remote_address()
    return str(remote[0]).partition("%")[0] if remote else None


def parse_addresses(raw: Iterable[bytes], *, limit: int = 4) -> tuple[Any, ...]:
    """The first few multiaddrs that parse, are of sane length and lead to a TCP port."""
    parsed: list[Any] = []
    for data in raw:
        if len(parsed) == limit:
            break
        try:
            if len(data) <= MAX_ADDRESS_BYTES and is_dialable(address := Multiaddr(data)):
                parsed.append(address)
        except Exception as error:  # multiaddr raises whatever its codecs raise
            log.debug("bad_address error=%s", cut(repr(error)))
    return tuple(parsed)


def is_dialable(address: Any) -> bool:
    """Whether a multiaddr names an IP address or a name, and a TCP port, that somebody could listen on."""
    names = [protocol.name for protocol in address.protocols()]
    if len(names) < 2 or names[0] not in ("ip4", "ip6", *_NAMES) or names[1] != "tcp":
        return False
    return address.value_for_protocol(names[0]) not in ANY_ADDRESS and address.value_for_protocol("tcp") != "0"


def with_port(ip: str, port: int) -> Any:
    """A multiaddr of an IP address and a TCP port."""
    return Multiaddr(f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}")
