"""How people hand a run to each other: its address, and peers to find it through, in one word.

    <operator peer id>/<name>                                the address alone
    <operator peer id>/<name>@<multiaddr>[,<multiaddr>...]   with peers, each as `--bootstrap` takes it

Such a word comes from anybody: it is bounded, and names no file of the computer that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2p.peers import PeerBook
from protocol.errors import BootstrapError, MalformedError
from protocol.identity import PeerId
from protocol.run import RunAddress

if TYPE_CHECKING:
    from node.config import NodeConfig

MAX_PEERS: Final = 16
MAX_CHARS: Final = 4096
SHOWN_PEERS: Final = 4
"""Peers in a line that is made: any one of them is enough."""
PEER_HINT: Final = (
    "write /ip4/<address>/tcp/<port>/p2p/<peer id>, as a relay prints it when it starts, or /dnsaddr/<name>"
)
_WORD: Final = re.compile(r"[!-~]+")
_DNSADDR: Final = re.compile(r"/dnsaddr/[A-Za-z0-9_.-]{1,253}(/p2p/[1-9A-HJ-NP-Za-km-z]+)?")
_TCP: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([A-Za-z0-9_.:%-]{1,253})/tcp/[0-9]{1,5}")
_REMEMBERING: Final = ("peers.json", "swarm.cache")
"""Files of a data directory that a node finds its run by, without being told again."""


@dataclass(frozen=True)
class RunLink:
    """A run's address and the peers that came with it."""

    address: RunAddress
    peers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RunLink:
        """Read either form. Raises MalformedError."""
        if len(text) > MAX_CHARS:
            raise MalformedError(f"not a run address: {len(text)} characters; at most {MAX_CHARS} are taken")
        if not _WORD.fullmatch(text):
            raise MalformedError(f"not a run address: {text[:120]!r} is more than one word")
        address, at, listed = text.partition("@")
        run = RunAddress.parse(address)
        peers = tuple(dict.fromkeys(listed.split(","))) if at else ()
        if len(peers) > MAX_PEERS:
            raise MalformedError(f"{len(peers)} peers behind the run's address; at most {MAX_PEERS} are taken")
        for peer in peers:
            check_peer(peer)
        return cls(run, peers)

    def __str__(self) -> str:
        return f"{self.address}@{','.join(self.peers)}" if self.peers else str(self.address)


def check_peer(text: str) -> None:
    """Whether a text can be a peer's multiaddr or a /dnsaddr. Raises MalformedError."""
    if _DNSADDR.fullmatch(text):
        return
    if not _WORD.fullmatch(text):
        raise MalformedError(f"{text[:120]!r} is no address of a peer: it is more than one word", hint=PEER_HINT)
    transport, found, peer = text.rpartition("/p2p/")
    try:
        if not found or not _TCP.fullmatch(transport):
            raise MalformedError("it has no /tcp/<port> or no /p2p/<peer id>")
        PeerId.parse(peer)
    except MalformedError as error:
        raise MalformedError(f"{text[:120]!r} is no address of a peer: {error.message}", hint=PEER_HINT) from error


def join_line(address: RunAddress | str, peers: Sequence[str]) -> str:
    """What a contributor types, with the peers that most can reach; files of this computer are left out."""
    link = f"{address}@{','.join(chosen)}" if (chosen := _reachable(peers)[:SHOWN_PEERS]) else str(address)
    return f"intellect-node --role inference --run {link}"


def require_way_in(config: NodeConfig) -> None:
    """Before a node leaves any trace: does it know anybody? Raises BootstrapError.

    A relay may be the first one of its run; every other node needs a peer, told now or remembered.
    """
    if config.role == "relay" or config.bootstrap or remembers_peers(config.data_dir):
        return
    raise BootstrapError(
        "no bootstrap address is given, and this node remembers no peers from an earlier start",
        hint="ask the run's operator for one: --run <address>@/ip4/<address>/tcp/8471/p2p/<relay's peer id>, "
        "or the same as --bootstrap /ip4/<address>/tcp/8471/p2p/<relay's peer id>",
    )


def remembers_peers(data_dir: Path) -> bool:
    """Whether a node was in its run from this directory."""
    return any((data_dir / name).exists() for name in _REMEMBERING)


def known_peers(data_dir: Path) -> list[str]:
    """Addresses of the peers that a directory's node heard of, the newest first."""
    return [
        f"{address}/p2p/{peer.peer_id}"
        for peer in PeerBook(data_dir / "peers.json").peers
        for address in peer.addresses[:1]
    ]


def _reachable(peers: Iterable[str]) -> list[str]:
    """Without files; without this computer's own addresses where there are others, the public ones first."""
    named = [peer for peer in dict.fromkeys(peers) if not peer.startswith("@")]
    near = {peer: _nearness(peer) for peer in named}
    elsewhere = [peer for peer in named if near[peer] < _LOOPBACK]
    return sorted(elsewhere or named, key=lambda peer: near[peer])


_LOOPBACK: Final = 2


def _nearness(peer: str) -> int:
    """0: for all the world, 1: in a network of its own, 2: on this computer."""
    match = _TCP.match(peer)
    try:
        address = ip_address(match[2]) if match else None
    except ValueError:  # a name
        return 0
    if address is None or address.is_global:
        return 0
    return _LOOPBACK if address.is_loopback or address.is_unspecified else 1
