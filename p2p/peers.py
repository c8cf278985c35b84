"""Peers remembered on disk, so that a node finds the swarm again when its bootstrap peers are gone.

A small JSON file, rewritten whole and atomically. Only peers that have answered are in it. What it says is a hint: a
damaged or hostile file costs some failed dials.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.atomic import write_atomically

log = logging.getLogger(__name__)

MAX_PEERS: Final = 64
MAX_FILE_BYTES: Final = 256 * 1024


class RememberedPeer(msgspec.Struct, frozen=True):
    """A peer that answered, and where."""

    peer_id: Annotated[str, Meta(max_length=80)]
    addresses: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=8)]
    seen_ms: int


class PeerBook:
    """The newest MAX_PEERS peers that answered, kept at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers = {peer.peer_id: peer for peer in _read(path)}

    @property
    def peers(self) -> list[RememberedPeer]:
        """Newest first."""
        return sorted(self._peers.values(), key=lambda peer: -peer.seen_ms)

    def note(self, seen: Iterable[RememberedPeer]) -> bool:
        """Take in peers that answered; return whether whom or where has changed, and the file should be saved."""
        before = {peer.peer_id: peer.addresses for peer in self.peers}
        self._peers.update((peer.peer_id, peer) for peer in seen)
        self._peers = {peer.peer_id: peer for peer in self.peers[:MAX_PEERS]}
        return before != {peer.peer_id: peer.addresses for peer in self.peers}

    def save(self) -> None:
        """Write the file, atomically. Blocks."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(self.peers), indent=1))


def _read(path: Path) -> list[RememberedPeer]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        return msgspec.json.decode(data, type=list[RememberedPeer])[:MAX_PEERS]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("peer_book_unreadable path=%s error=%s next=starting_empty", path, error)
        return []
