"""A port that is this program's alone, or an error that says who may have it."""

from __future__ import annotations

import errno
import socket

from protocol.errors import PortError


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket that no other program shares. Raises PortError naming the port, the cause and the remedy."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise PortError(f"there is no port {port}", hint="give a port from 1024 to 65535, or 0 for any free one")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise PortError(f"no address to listen on called {host!r}: {error}", hint="give an IP address") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # takes over from connections in TIME_WAIT only
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _port_error(host, port, error) from error
    return sock


def _port_error(host: str, port: int, error: OSError) -> PortError:
    number = error.errno
    if number == errno.EADDRINUSE:
        return PortError(
            f"port {port} on {host} is taken: another program, or another node of yours, listens there",
            hint=f"see who has it with `ss -ltnp 'sport = :{port}'`, or give another port",
        )
    if number == errno.EACCES:
        return PortError(f"port {port} needs administrator rights", hint="give a port from 1024 to 65535")
    if number == errno.EADDRNOTAVAIL:
        return PortError(
            f"cannot listen on {host}: this computer has no such address", hint="give 0.0.0.0 or a local address"
        )
    return PortError(f"cannot listen on {host} port {port}: {error}", hint="give another address or port")
