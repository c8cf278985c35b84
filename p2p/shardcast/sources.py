"""Whom a download may ask, what is known of each, and how far a checkpoint is there (SHARDCAST).

`Standing` is what a source answers about one checkpoint: signed parts, the manifest, and which shards may be had.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from p2p.contacts import Contact
from p2p.http import PROGRESS_TIMEOUT_S, HttpClient, HttpResponse
from p2p.shardcast.balance import Balancer
from protocol.constants import MAX_SHARDS
from protocol.errors import MalformedError, RefusedError, RelayError
from protocol.identity import PeerId
from protocol.records import CheckpointManifest, CheckpointPart

log = logging.getLogger(__name__)

MAX_STANDING_BYTES: Final = CheckpointManifest.MAX_BYTES + CheckpointPart.MAX_BYTES + (1 << 20)

NOT_HERE: Final = frozenset({"not-yet", "not-found", "no-manifest"})
"""Refusals that say nothing bad about a relay: what was asked for is still on its way there."""
ASKED_TOO_MUCH: Final = frozenset({"busy", "too-many-requests"})
REPEAT_S: Final = 10.0
"""Before the same failure of the same source is logged again."""
MAX_TOLD: Final = 256


class Source(NamedTuple):
    """Someone to download from: `url` is the part before `/v1`; a contact says how to be let in."""

    peer: PeerId
    url: str
    contact: Contact | None = None


Sources = Callable[[], Sequence[Source]]
OnBytes = Callable[[PeerId, int], None]
OnMisdeed = Callable[[PeerId, str], None]


class Standing(msgspec.Struct, array_like=True, frozen=True):
    """How far a checkpoint is at a source."""

    shards: int
    parts: list[bytes]
    """Envelopes, from the number on that was asked for."""
    manifest: bytes
    """The envelope; empty while it is not signed yet."""
    held: bytes
    """Shards that may be had: shard i is bit i % 8 of byte i // 8."""

    def held_bits(self) -> int:
        """`held` as a number whose bit i stands for shard i. Raises MalformedError."""
        if not 0 < self.shards <= MAX_SHARDS or len(self.held) != (self.shards + 7) // 8:
            raise MalformedError(f"{len(self.held)} bytes say which of {self.shards} shards are there")
        return int.from_bytes(self.held, "little") & ((1 << self.shards) - 1)


def pack_bits(held: int, shards: int) -> bytes:
    """What `held` of a Standing is."""
    return held.to_bytes((shards + 7) // 8, "little")


def open_standing(data: bytes) -> Standing:
    """Raises MalformedError."""
    try:
        return msgspec.msgpack.decode(data, type=Standing)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedError(f"not a checkpoint's standing: {str(error)[:200]}") from error


@dataclass
class Links:
    """The sources of one node, asked through one client, and what is remembered and told of each."""

    http: HttpClient
    sources: Sources
    balancer: Balancer = field(default_factory=Balancer)
    progress_timeout_s: float = PROGRESS_TIMEOUT_S
    on_bytes: OnBytes | None = None
    on_misdeed: OnMisdeed | None = None
    _told: dict[PeerId, tuple[str, float]] = field(default_factory=dict)
    """What was last logged of a source, and when."""

    async def get(self, source: Source, path: str, *, max_bytes: int, wait_s: float = 0.0) -> HttpResponse:
        """A small answer. Raises RelayError after it has scored the source for it."""
        try:
            response = await self.http.get(
                f"{source.url.rstrip('/')}{path}",
                timeout_s=wait_s + 4 * self.progress_timeout_s,
                max_bytes=max_bytes,
                contact=source.contact,
            )
        except RelayError as error:
            self.note_failure(source.peer, error)
            raise
        self.count(source.peer, len(response.body))
        return response

    async def get_shard(self, source: Source, path: str, sink: Callable[[Any], None], **limits: Any) -> bytes:
        """A shard's bytes into `sink`; gives their SHA-256. Raises RelayError, and what `sink` raises."""
        url = f"{source.url.rstrip('/')}{path}"
        return await self.http.get_stream(
            url, sink, progress_timeout_s=self.progress_timeout_s, contact=source.contact, **limits
        )

    async def get_patch(self, source: Source, path: str, *, max_bytes: int, timeout_s: float) -> bytes:
        """What stands for a shard, whole in memory. Raises RelayError; a refusal may be no fault, so none is scored."""
        response = await self.http.get(
            f"{source.url.rstrip('/')}{path}",
            timeout_s=timeout_s,
            progress_timeout_s=self.progress_timeout_s,
            max_bytes=max_bytes,
            contact=source.contact,
        )
        self.count(source.peer, len(response.body))
        return response.body

    def note_failure(self, peer: PeerId, error: RelayError) -> None:
        if isinstance(error, RefusedError):
            if error.code in NOT_HERE:
                return
            if error.code in ASKED_TOO_MUCH:
                self.balancer.busy(peer, seconds=error.retry_after_s)
                return
        self.balancer.failed(peer)
        self._tell(peer, error.message[:300])

    def _tell(self, peer: PeerId, failure: str) -> None:
        """Requests under way together fail together: one line for them."""
        now = time.monotonic()
        said, at = self._told.get(peer, ("", -REPEAT_S))
        if said != failure or now - at >= REPEAT_S:
            log.info("relay=%s failed=%r", peer.short, failure)
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told[peer] = failure, now

    def blame(self, peer: PeerId, what: str) -> None:
        """A relay sent what no honest one sends."""
        self.balancer.misbehaved(peer)
        log.warning("relay=%s misdeed=%r action=ask-others", peer.short, what[:300])
        if self.on_misdeed is not None:
            self.on_misdeed(peer, what)

    def count(self, peer: PeerId, received: int) -> None:
        if self.on_bytes is not None and received:
            self.on_bytes(peer, received)


def checkpoint_path(checkpoint: bytes, rest: str) -> str:
    return f"/v1/checkpoints/{checkpoint.hex()}/{rest}"
