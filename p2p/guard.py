"""A host's door: how much one peer and one address may take, and who is not let in.

Counts what is open and refuses what is beyond; p2p.patches calls it where libp2p accepts sockets, connections and
streams. Misdeeds reported here are scored (p2p.scores); a ban ends the peer's connections.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio

from p2p.addresses import Scope, neighbourhood, remote_ip, scope_of_ip
from p2p.scores import Misdeed, Scores

log = logging.getLogger(__name__)

MAX_HALF_OPEN_PER_ADDRESS: Final = 32
MAX_CONNECTIONS_PER_ADDRESS: Final = 128
"""Of one /24 or /64; loopback excepted, where whole swarms are simulated."""
MAX_STREAMS_PER_PEER: Final = 32
MAX_STREAMS_PER_ADDRESS: Final = 256
HANG_UP_TIMEOUT_S: Final = 1.0


MAX_DIALS_PER_S: Final = 20
"""That this node makes, whatever it was told: a swarm that comes back must not storm whoever is there first."""


class Pace:
    """Lets MAX_DIALS_PER_S through in any second; the rest wait."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=MAX_DIALS_PER_S)

    async def wait(self) -> None:
        """Take the next free moment, and sleep until then."""
        now = trio.current_time()
        moment = max(now, self._latest[0] + 1) if len(self._latest) == MAX_DIALS_PER_S else now
        self._latest.append(moment)
        await trio.sleep(moment - now)


class Refused(Exception):
    """Raised when something is beyond a peer's or an address's share, or a peer is banned."""


class Guard:
    """What is open at one host, by peer and by neighbourhood."""

    def __init__(self, scores: Scores | None = None) -> None:
        self.scores = scores or Scores()
        self.dials = Pace()
        self._half_open: Counter[str] = Counter()
        self._connections: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    @contextmanager
    def handshake(self, ip: str) -> Iterator[None]:
        """Room for one socket that has not proved who it is. Raises Refused."""
        if self.scores.is_banned_address(ip):
            raise Refused(f"{neighbourhood(ip)} is banned")
        with _counted(self._half_open, {ip: MAX_HALF_OPEN_PER_ADDRESS}):
            yield

    @contextmanager
    def connection(self, peer: object, ip: str) -> Iterator[None]:
        """Room for one inbound connection. Raises Refused."""
        if self.scores.is_banned(peer):
            raise Refused(f"{peer} is banned")
        shares = {} if _is_loopback(ip) else {neighbourhood(ip): MAX_CONNECTIONS_PER_ADDRESS}
        with _counted(self._connections, shares):
            yield

    @contextmanager
    def stream(self, peer: object, ip: str | None) -> Iterator[None]:
        """Room for one inbound stream. Raises Refused."""
        shares = {str(peer): MAX_STREAMS_PER_PEER}
        if ip is not None and not _is_loopback(ip):
            shares[neighbourhood(ip)] = MAX_STREAMS_PER_ADDRESS
        with _counted(self._streams, shares):
            yield

    async def blame(self, host: Any, connection: Any, misdeed: Misdeed) -> None:
        """Score what the peer at the other end of a connection or stream has done; hang up if that was enough."""
        muxed = getattr(connection, "muxed_conn", connection)
        log.debug("misdeed peer=%s kind=%s", muxed.peer_id, misdeed.name)
        if self.scores.blame(muxed.peer_id, misdeed, ip=remote_ip(muxed)):
            await hang_up(host, muxed.peer_id)


async def hang_up(host: Any, peer_id: Any) -> None:
    """End every connection to a peer, waiting a second at most."""
    with trio.move_on_after(HANG_UP_TIMEOUT_S, shield=True):
        for connection in host.get_network().get_connections(peer_id):
            await connection.close()


def _is_loopback(ip: str) -> bool:
    return scope_of_ip(ip) == Scope.LOOPBACK


@contextmanager
def _counted(counts: Counter[str], shares: dict[str, int]) -> Iterator[None]:
    for name, most in shares.items():
        if counts[name] >= most:
            raise Refused(f"{name} has {most} open already")
    counts.update(shares.keys())
    try:
        yield
    finally:
        for name in shares:
            counts[name] -= 1
            if counts[name] <= 0:
                del counts[name]
