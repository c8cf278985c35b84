"""A host's door: how much one peer and one address may take, and who is not let in.

Counts what is open and refuses what is beyond; p2p.patches calls it where libp2p accepts sockets, connections and
streams. Misdeeds reported here are scored (p2p.scores); a ban ends the peer's connections.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from p2p.addresses import Scope, neighbourhood, remote_ip, scope_of_ip
from p2p.scores import Misdeed, Scores

log = logging.getLogger(__name__)

MAX_HALF_OPEN_PER_ADDRESS: Final = 32
MAX_SILENCE_S: Final = 2.0
MAX_FIRST_SILENCE_S: Final = 0.25
"""For so long it may be silent, after it has said something and before, and is not made to give way."""
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


@dataclass(eq=False)
class HalfOpen:
    """A socket that has not proved who it is."""

    ip: str
    heard_at: float
    heard: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def note(self) -> None:
        """It has said something."""
        self.heard, self.heard_at = True, trio.current_time()

    def silent_s(self) -> float:
        """For how much longer it has been silent than it may be."""
        return trio.current_time() - self.heard_at - (MAX_SILENCE_S if self.heard else MAX_FIRST_SILENCE_S)


class Guard:
    """What is open at one host, by peer and by neighbourhood."""

    def __init__(self, scores: Scores | None = None, *, dials: Pace | None = None) -> None:
        """`dials` is shared by hosts of one node."""
        self.scores = scores or Scores()
        self.dials = dials or Pace()
        self._half_open: list[HalfOpen] = []
        self._connections: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    @contextmanager
    def handshake(self, ip: str) -> Iterator[HalfOpen]:
        """Room for one socket that has not proved who it is. Raises Refused.

        Where an address has too many, the one that has been silent for longest makes room: whoever holds them must not
        shut out a neighbour behind the same address. Those that are at it are left alone, or a crowd that comes back at
        once would never get in.
        """
        if self.scores.is_banned_address(ip):
            raise Refused(f"{neighbourhood(ip)} is banned")
        if len(others := [each for each in self._half_open if each.ip == ip]) >= MAX_HALF_OPEN_PER_ADDRESS:
            silent = max(others, key=HalfOpen.silent_s)
            if silent.silent_s() <= 0:
                raise Refused(f"{ip} has {MAX_HALF_OPEN_PER_ADDRESS} open already")
            self._half_open.remove(silent)
            silent.scope.cancel()
        self._half_open.append(mine := HalfOpen(ip, trio.current_time()))
        try:
            with mine.scope:
                yield mine
        finally:
            if mine in self._half_open:
                self._half_open.remove(mine)
        if mine.scope.cancelled_caught:
            raise Refused(f"{ip} was silent, and has opened others since")

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
