"""Downloading a checkpoint from several relays at once, none of which is trusted (SHARDCAST).

The manifest is asked for by its id, each shard by its number, from a relay that p2p.shardcast.balance draws. Every
shard is hashed as it arrives; a wrong one names its relay and is fetched elsewhere. What is verified survives a
restart.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import trio

from p2p.http import PROGRESS_TIMEOUT_S, HttpClient
from p2p.shardcast.balance import Balancer
from p2p.shardcast.partial import PartialCheckpoint
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules, open_checkpoint, shard_range
from protocol.envelope import Signed
from protocol.errors import (
    ChecksumError,
    DataDirError,
    MalformedError,
    NodeError,
    ProtocolError,
    RefusedError,
    RelayError,
)
from protocol.identity import PeerId
from protocol.records import CheckpointManifest

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 6
PATIENCE_S: Final = 60.0
"""How long a download may go without a byte from anyone before it is given up; what it has stays for the next one."""
POLL_S: Final = 0.25
"""Between two rounds of asking for a shard that no relay has yet."""
SLACK: Final = 10.0
"""A shard may take this many times as long as from the fastest relay; so a trickle cannot hold the last shard."""
SHORTEST_SHARD_S: Final = 30.0
LONGEST_SHARD_S: Final = 600.0
MAX_INSTALLS: Final = 3

_NOT_HERE: Final = frozenset({"not-yet", "not-found", "no-manifest"})


class Source(NamedTuple):
    """Someone to download from: `url` is the part before `/v1`."""

    peer: PeerId
    url: str
    headers: Mapping[str, str] = MappingProxyType({})


Sources = Callable[[], Sequence[Source | tuple[PeerId, str]]]
OnBytes = Callable[[PeerId, int], None]
OnMisdeed = Callable[[PeerId, str], None]
OnProgress = Callable[[int, int, Mapping[PeerId, int]], None]


@dataclass
class _Job:
    """One download under way."""

    manifest: Signed[CheckpointManifest]
    partial: PartialCheckpoint
    queue: deque[int]
    alive_at: float
    received: dict[PeerId, int] = field(default_factory=dict)
    failure: NodeError | None = None

    def url_of(self, source: Source, index: int) -> str:
        return f"{_checkpoint_url(source, self.manifest.id)}/shards/{index}"

    def length_of(self, index: int) -> int:
        record = self.manifest.record
        return len(shard_range(index, record.total_bytes, shard_bytes=record.shard_bytes))


class CheckpointClient:
    """Downloads checkpoints into a store. `relays` is asked again for every shard, so the set may change at any time.

    Callbacks run in trio's thread: `on_bytes(relay, received)`, `on_misdeed(relay, what)`,
    `on_progress(bytes done, bytes in total, bytes by relay)`.
    """

    def __init__(
        self,
        http: HttpClient,
        store: CheckpointStore,
        rules: CheckpointRules,
        relays: Sources,
        *,
        balancer: Balancer | None = None,
        connections: int = MAX_CONNECTIONS,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        on_bytes: OnBytes | None = None,
        on_misdeed: OnMisdeed | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._http = http
        self._store = store
        self._rules = rules
        self._relays = relays
        self._balancer = balancer or Balancer()
        self._connections = connections
        self._progress_timeout_s = progress_timeout_s
        self._patience_s = patience_s
        self._on_bytes = on_bytes
        self._on_misdeed = on_misdeed
        self._on_progress = on_progress
        self._lock = trio.Lock()

    async def download(self, checkpoint: bytes, *, step: int | None = None) -> Signed[CheckpointManifest]:
        """Have a checkpoint complete in the store, whatever is missing of it fetched.

        Raises RelayError when no relay gives a byte for `patience_s`, ProtocolError when the checkpoint itself breaks
        the run's rules, DataDirError when this disk cannot take it. Cancelling keeps what is verified. Calls at the
        same time are served one after the other.
        """
        async with self._lock:
            manifest = self._store.manifest(checkpoint) or await self._fetch_manifest(checkpoint)
            self._rules.check(manifest, step=step)
            try:
                with self._store.begin(manifest) as partial:
                    if partial is not None:
                        await self._complete(manifest, partial)
            except OSError as error:
                raise _disk_error(error) from error
            return manifest

    async def _complete(self, manifest: Signed[CheckpointManifest], partial: PartialCheckpoint) -> None:
        for attempt in range(MAX_INSTALLS):
            await self._fetch_shards(manifest, partial)
            try:
                await self._store.install(manifest.id)
                return
            except MalformedError:
                self._store.discard(manifest.id)
                raise
            except ChecksumError as error:
                log.warning("checkpoint=%s install=%d error=%r", manifest.id.hex()[:12], attempt, error.message)
        raise DataDirError(
            f"checkpoint step {manifest.record.step} was damaged on this disk {MAX_INSTALLS} times in a row",
            hint="check the disk and the memory of this computer",
        )

    # ----------------------------------------------------------------------------------------------------- manifest

    async def _fetch_manifest(self, checkpoint: bytes) -> Signed[CheckpointManifest]:
        asked: set[PeerId] = set()
        said = "no relay is known"
        with trio.move_on_after(self._patience_s):
            while True:
                source = await self._choose(asked)
                try:
                    return await self._manifest_from(source, checkpoint)
                except RelayError as error:
                    said = error.message
                except ProtocolError as error:
                    said = error.message
                    self._blame(source.peer, f"manifest of checkpoint {checkpoint.hex()[:12]}: {error.message}")
                await self._next_round(asked, source.peer)
        raise RelayError(f"no relay gave the manifest of checkpoint {checkpoint.hex()[:12]}; the last word was: {said}")

    async def _manifest_from(self, source: Source, checkpoint: bytes) -> Signed[CheckpointManifest]:
        try:
            response = await self._http.get(
                f"{_checkpoint_url(source, checkpoint)}/manifest",
                timeout_s=4 * self._progress_timeout_s,
                max_bytes=CheckpointManifest.MAX_BYTES + 1024,
                headers=source.headers,
            )
        except RelayError as error:
            self._note_failure(source.peer, error)
            raise
        self._count(source.peer, len(response.body))
        return open_checkpoint(response.body, checkpoint)

    # ------------------------------------------------------------------------------------------------------- shards

    async def _fetch_shards(self, manifest: Signed[CheckpointManifest], partial: PartialCheckpoint) -> None:
        job = _Job(manifest, partial, deque(partial.missing()), time.monotonic())
        async with trio.open_nursery() as nursery:
            for _ in range(min(self._connections, len(job.queue))):
                nursery.start_soon(self._work, job, nursery.cancel_scope)
        if job.failure is not None:
            raise job.failure

    async def _work(self, job: _Job, everyone: trio.CancelScope) -> None:
        try:
            while job.queue:
                await self._fetch_shard(job, job.queue.popleft())
        except NodeError as error:
            job.failure = error
            everyone.cancel()
        except OSError as error:  # of this node's disk: the network's are RelayErrors
            job.failure = _disk_error(error)
            everyone.cancel()

    async def _fetch_shard(self, job: _Job, index: int) -> None:
        asked: set[PeerId] = set()
        said = "no relay is known"
        while (left_s := self._patience_left_s(job)) > 0:
            source = None
            with trio.move_on_after(left_s):
                source = await self._choose(asked)
            if source is None:
                continue  # out of patience, unless another shard made progress meanwhile
            problem = await self._shard_from(job, index, source)
            if problem is None:
                self._report_progress(job)
                return
            said = problem
            await self._next_round(asked, source.peer)
        step = job.manifest.record.step
        raise RelayError(f"no relay gave shard {index} of checkpoint step {step}; the last word was: {said}")

    async def _shard_from(self, job: _Job, index: int, source: Source) -> str | None:
        """Fetch one shard from one relay; what went wrong, or None."""
        length = job.length_of(index)
        sink = job.partial.sink(index)
        started = time.monotonic()

        def take(piece: bytes) -> None:
            sink.write(piece)
            job.alive_at = time.monotonic()

        try:
            digest = await self._http.get_stream(
                job.url_of(source, index),
                take,
                expected_bytes=length,
                timeout_s=self._shard_timeout_s(length),
                progress_timeout_s=self._progress_timeout_s,
                headers=source.headers,
            )
            await trio.to_thread.run_sync(sink.commit, digest)
        except ChecksumError as error:
            self._blame(source.peer, error.message)
            return error.message
        except RelayError as error:
            self._note_failure(source.peer, error)
            return error.message
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(sink.close)
            job.received[source.peer] = job.received.get(source.peer, 0) + sink.received
            self._count(source.peer, sink.received)
        self._balancer.succeeded(source.peer, bytes_count=length, seconds=time.monotonic() - started)
        return None

    def _shard_timeout_s(self, length: int) -> float:
        best = self._balancer.best_throughput()
        if best is None:
            return LONGEST_SHARD_S
        return min(LONGEST_SHARD_S, max(SHORTEST_SHARD_S, SLACK * length / best))

    def _patience_left_s(self, job: _Job) -> float:
        return job.alive_at + self._patience_s - time.monotonic()

    # ------------------------------------------------------------------------------------------------------- relays

    async def _choose(self, asked: Collection[PeerId]) -> Source:
        """The relay to ask next; waits while all are paused or none is known."""
        while True:
            sources = {source.peer: source for source in (Source(*each) for each in self._relays())}
            peer = self._balancer.choose(list(sources), avoid=asked)
            if peer is not None:
                return sources[peer]
            pauses = [self._balancer.paused_s(each) for each in sources]
            await trio.sleep(min([POLL_S, *pauses]) + 0.01)

    async def _next_round(self, asked: set[PeerId], peer: PeerId) -> None:
        """After a relay could not help: ask each of the others before it is asked again, after a moment."""
        asked.add(peer)
        if all(Source(*each).peer in asked for each in self._relays()):
            asked.clear()
            await trio.sleep(POLL_S)

    def _note_failure(self, peer: PeerId, error: RelayError) -> None:
        if isinstance(error, RefusedError) and error.code in _NOT_HERE:
            return
        self._balancer.failed(peer)
        log.info("relay=%s failed=%r", peer.short, error.message[:300])

    def _blame(self, peer: PeerId, what: str) -> None:
        self._balancer.misbehaved(peer)
        log.warning("relay=%s misdeed=%r action=ask-others", peer.short, what[:300])
        if self._on_misdeed is not None:
            self._on_misdeed(peer, what)

    def _count(self, peer: PeerId, received: int) -> None:
        if self._on_bytes is not None and received:
            self._on_bytes(peer, received)

    def _report_progress(self, job: _Job) -> None:
        if self._on_progress is not None:
            self._on_progress(job.partial.verified_bytes, job.manifest.record.total_bytes, dict(job.received))


def _disk_error(error: OSError) -> DataDirError:
    return DataDirError(
        f"a checkpoint cannot be written to this node's data directory: {error}",
        hint="look at the disk's free space and permissions, then start the node again; the download goes on",
    )


def _checkpoint_url(source: Source, checkpoint: bytes) -> str:
    return f"{source.url.rstrip('/')}/v1/checkpoints/{checkpoint.hex()}"
