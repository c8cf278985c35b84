"""The run's tokenizer, so that token ids can be read as text: from a policy on this disk, or else from the relays.

Whoever holds no policy fetches tokenizer.json alone, once: the ranges of the checkpoint's shards that it lies in. What
arrives counts only if it has the hash that the run's manifest names, so nothing else of the checkpoint is looked at.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import trio

from node.swarm import Swarm
from p2p.http import HttpClient
from p2p.shardcast.sources import Source, checkpoint_path
from p2p.shardcast.store import CheckpointStore
from protocol.atomic import write_atomically
from protocol.checkpoint import Layout, open_checkpoint
from protocol.errors import MalformedError, ProtocolError, RelayError
from protocol.records import CheckpointManifest

log = logging.getLogger(__name__)

FILE: Final = "tokenizer.json"
MAX_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 4 << 20
HEAD_WAIT_S: Final = 5.0

FindTokenizer = Callable[[], Awaitable[Path | None]]
"""A directory with the run's tokenizer; None while there is none."""


def of_newest_policy(store: CheckpointStore) -> FindTokenizer:
    """The newest complete policy's."""

    async def find() -> Path | None:
        held = store.complete()
        return store.local_dir(held[-1][1]) if held else None

    return find


def from_relays(swarm: Swarm, http: HttpClient, directory: Path) -> FindTokenizer:
    """Fetched into `directory` when it is first asked for."""

    async def find() -> Path | None:
        wanted = swarm.manifest.record.model.tokenizer
        if await trio.to_thread.run_sync(_is_there, directory / FILE, wanted):
            return directory
        with trio.move_on_after(HEAD_WAIT_S):
            head = await swarm.wait_head(0)
            for source in swarm.sources():
                try:
                    data = await _fetch(http, source, head.record.checkpoint)
                except (RelayError, ProtocolError) as error:
                    log.info("tokenizer relay=%s error=%r", source.peer.short, error.message)
                    continue
                if hashlib.sha256(data).digest() == wanted:
                    write_atomically(directory / FILE, data)
                    return directory
                log.warning("tokenizer relay=%s has another hash than the run's", source.peer.short)
        return None

    return find


def _is_there(path: Path, sha256: bytes) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).digest() == sha256
    except OSError:
        return False


async def _fetch(http: HttpClient, source: Source, checkpoint: bytes) -> bytes:
    """tokenizer.json as this relay has it. Raises RelayError or ProtocolError."""
    base = source.url.rstrip("/")
    url = base + checkpoint_path(checkpoint, "manifest")
    answer = await http.get(url, max_bytes=CheckpointManifest.MAX_BYTES + 1024, contact=source.contact)
    layout = Layout.of(open_checkpoint(answer.body, checkpoint).record)
    data = bytearray()
    for index, first, last in _pieces(layout):
        piece = await http.get(
            base + checkpoint_path(checkpoint, f"shards/{index}"),
            max_bytes=PIECE_BYTES,
            headers={"Range": f"bytes={first}-{last}"},
            contact=source.contact,
        )
        data += piece.body
    return bytes(data)


def _pieces(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Where tokenizer.json lies: shard, first byte and last byte within it, in order."""
    start = 0
    for file in layout.files:
        if file.name == FILE:
            break
        start += file.size
    else:
        raise MalformedError("the checkpoint has no tokenizer.json")
    if file.size > MAX_BYTES:
        raise MalformedError(f"a tokenizer of {file.size} bytes; at most {MAX_BYTES} are taken")
    at, end = start, start + file.size
    while at < end:
        index, first = divmod(at, layout.shard_bytes)
        length = min(end - at, layout.shard_bytes - first, PIECE_BYTES)
        yield index, first, first + length - 1
        at += length
