"""One download under way: which shard is fetched from whom, and when to give up (SHARDCAST).

Workers take a source by throughput and success, then a shard that it has, at random, so that relays which pull at once
have different shards to give each other. A shard that is far slower than it would be elsewhere is fetched elsewhere.
What each source has is p2p.shardcast.following's work.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.shardcast.draft import Draft
from p2p.shardcast.following import LOOK_S, Followed, Following, Pulse
from p2p.shardcast.partial import PartialCheckpoint
from p2p.shardcast.patch_client import Patching
from p2p.shardcast.sources import Links, checkpoint_path
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.errors import DataDirError, NodeError, ProtocolError, RelayError
from protocol.identity import PeerId

log = logging.getLogger(__name__)

BREATH_S: Final = 0.02
PLENTY_S: Final = 0.3
"""Between two questions to a source while there are shards to choose from. Longer ones make relays that pull at once
choose the same shards."""
FEW: Final = 2
QUICK_SHARD_S: Final = 0.5
SLACK: Final = 10.0
"""A shard may take this many times as long as from the fastest relay; so a trickle cannot hold the last shard."""
SHORTEST_SHARD_S: Final = 30.0
SHORTEST_PATCH_S: Final = 10.0
LONGEST_SHARD_S: Final = 600.0
STEAL_AFTER_S: Final = 1.0
STEAL_UNKNOWN_AFTER_S: Final = 3.0
"""The same while no other source has been measured."""
LAST_SHARDS: Final = 8
STEAL_FACTOR: Final = 3.0
STEAL_SPARE_S: Final = 1.0
"""Whoever has nothing else to fetch takes over a shard that would still need so many times what it needs elsewhere, or
what shards took lately: those that come together share this node's own link."""
TRICKLE: Final = 10.0
TRICKLE_S: Final = 5.0
"""The same while there is other work: only from a relay that is hopeless."""
MAX_AT_ONE: Final = 3
"""Shards at once from one source of several, so that each is whole, and can be passed on, sooner."""

OnProgress = Callable[[int, int, Mapping[PeerId, int]], None]


@dataclass(eq=False)
class _Attempt:
    """A shard on its way."""

    index: int
    followed: Followed
    length: int
    began_at: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    received: int = 0
    whole: bool = False
    """Not a patch, which is small, of unknown length, and makes way for the whole shard when it takes long."""

    def remaining_s(self, now: float) -> float:
        """At the speed so far."""
        return (self.length - self.received) * (now - self.began_at) / max(self.received, 1)


class Transfer:
    """`run` ends when the manifest is known and every shard is verified."""

    def __init__(
        self,
        links: Links,
        store: CheckpointStore,
        rules: CheckpointRules,
        partial: PartialCheckpoint,
        *,
        patching: Patching,
        connections: int,
        patience_s: float,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._links = links
        self._partial = partial
        self._patching = patching
        self._connections = connections
        self._patience_s = patience_s
        self._on_progress = on_progress
        self._pulse = Pulse()
        self._following = Following(
            links,
            store,
            rules,
            partial,
            pulse=self._pulse,
            on_answer=self._look_at_todo,
            on_disk_error=self._fail,
            breath_s=self._breath_s,
        )
        self._attempts: dict[int, _Attempt] = {}
        self._slow_at: dict[int, PeerId] = {}
        """By shard, from whom it was taken away."""
        self._todo = 0
        """Shards that may be fetched and nobody fetches, as a number whose bit i stands for shard i."""
        self._took_s: deque[float] = deque(maxlen=LAST_SHARDS)
        """How long the last shards took."""
        self._received: dict[PeerId, int] = {}
        self._failure: NodeError | None = None

    @property
    def draft(self) -> Draft:
        return self._partial.draft

    @property
    def _sources(self) -> Mapping[PeerId, Followed]:
        return self._following.sources

    async def run(self) -> None:
        """Raises RelayError when nobody gives a byte for `patience_s`, DataDirError when this disk cannot take it."""
        await trio.to_thread.run_sync(self._partial.recheck)
        self._look_at_todo()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._following.run)
            nursery.start_soon(self._watch_attempts)
            for number in range(self._connections):
                nursery.start_soon(self._work, number)
            await self._until_over()
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _until_over(self) -> None:
        while not self._partial.is_whole and self._failure is None:
            news = self._pulse.news
            if (left_s := self._pulse.alive_at + self._patience_s - time.monotonic()) <= 0:
                self._failure = self._gave_up()
                return
            with trio.move_on_after(left_s):
                await news.wait()

    def _gave_up(self) -> RelayError:
        missing = self._partial.missing()
        what = f"shard {missing[0]}" if missing else "the manifest"
        said = self._pulse.last_word or ("none was ready to be asked" if self._links.sources() else "no relay is known")
        step = self.draft.layout.step
        return RelayError(f"no relay gave {what} of checkpoint step {step}; the last word was: {said}")

    def _look_at_todo(self) -> None:
        self._todo = self._partial.wanted() & ~sum(1 << index for index in self._attempts)
        self._pulse.wake()

    def _is_starved(self) -> bool:
        """Whether workers have nothing to choose from."""
        return not any(each.held & self._todo for each in self._sources.values())

    def _breath_s(self) -> float:
        """How long a source may be left alone: what it has is asked for as soon as there is nothing else to fetch."""
        return BREATH_S if self._is_starved() else PLENTY_S

    # ----------------------------------------------------------------------------------------------------- fetching

    async def _work(self, number: int) -> None:
        while True:
            news = self._pulse.news
            choice = self._choose() if number < self._useful_workers() else None
            if choice is None:
                with trio.move_on_after(LOOK_S):
                    await news.wait()
                continue
            try:
                await self._fetch(*choice)
            except OSError as error:  # of this node's disk: the network's are RelayErrors
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failure = disk_error(error)
        self._pulse.wake()

    def _useful_workers(self) -> int:
        """On a quick link one or two connections fill it, and the first shard is whole sooner when it comes alone."""
        longest_s = max((time.monotonic() - each.began_at for each in self._attempts.values()), default=0.0)
        if max(longest_s, self._took_s[-1] if self._took_s else 0.0) > QUICK_SHARD_S:
            return self._connections
        return FEW if self._partial.count else 1

    def _choose(self) -> tuple[Followed, int] | None:
        balancer = self._links.balancer
        ready = {
            peer: each
            for peer, each in self._sources.items()
            if each.held & self._todo and balancer.paused_s(peer) <= 0 and not self._is_full(each)
        }
        peer = balancer.choose(list(ready))
        if peer is None:
            return None
        index = random_bit(self._rarest(ready[peer].held & self._todo))
        slow = self._slow_at.get(index)
        others = [other for other in ready if other != slow and ready[other].held >> index & 1]
        if slow == peer and others:
            peer = random.choice(others)
        return ready[peer], index

    def _is_full(self, followed: Followed) -> bool:
        at_it = sum(attempt.followed is followed for attempt in self._attempts.values())
        return at_it >= MAX_AT_ONE and len(self._sources) > 1

    def _rarest(self, shards: int) -> int:
        """Those of the shards that one source alone has, if there are any: so that those who pull at once can share."""
        once = more = 0
        for each in self._sources.values():
            more |= once & each.held
            once |= each.held
        return shards & ~more or shards

    async def _fetch(self, followed: Followed, index: int) -> None:
        length = self.draft.layout.length(index)
        attempt = _Attempt(index, followed, length, time.monotonic())
        self._attempts[index] = attempt
        self._todo &= ~(1 << index)
        try:
            with attempt.scope:
                await self._fetch_from(attempt)
        finally:
            del self._attempts[index]
            if not self._partial.has(index):
                self._todo |= 1 << index
        if attempt.scope.cancelled_caught and attempt.whole:
            seconds = time.monotonic() - attempt.began_at
            self._links.balancer.observed(followed.source.peer, bytes_count=attempt.received, seconds=seconds)
        self._pulse.wake()

    async def _fetch_from(self, attempt: _Attempt) -> None:
        followed, index = attempt.followed, attempt.index
        peer = followed.source.peer
        try:
            if not await self._fetch_smaller(attempt):
                attempt.whole, attempt.began_at = True, time.monotonic()
                await self._fetch_whole(attempt)
        except ProtocolError as error:
            self._failed(followed, index, error.message)
            self._links.blame(peer, error.message)
        except RelayError as error:
            self._failed(followed, index, error.message)
            self._links.note_failure(peer, error)
        finally:
            self._received[peer] = self._received.get(peer, 0) + attempt.received
            self._report_progress(index)

    async def _fetch_smaller(self, attempt: _Attempt) -> bool:
        """Have a shard by a patch of the version that is held, as it is there, or packed; whether that worked."""
        followed, balancer = attempt.followed, self._links.balancer
        timeout_s = max(SHORTEST_PATCH_S, SLACK * attempt.length / (balancer.best_throughput() or math.inf))

        async def ask(path: str, max_bytes: int) -> bytes:
            path = checkpoint_path(followed.name, path)
            return await self._links.get_patch(followed.source, path, max_bytes=max_bytes, timeout_s=timeout_s)

        if await self._patching.copy(attempt.index):
            self._pulse.beat()
            return True
        peer, throughput = followed.source.peer, balancer.best_throughput()
        received = await self._patching.fetch(attempt.index, peer, ask, throughput=throughput)
        if received is None:
            return False
        attempt.received = received
        self._pulse.beat()
        balancer.did_well(peer)
        return True

    async def _fetch_whole(self, attempt: _Attempt) -> None:
        followed, index = attempt.followed, attempt.index
        peer = followed.source.peer
        sink = self._partial.sink(index)

        def take(piece: memoryview) -> None:
            sink.write(piece)
            attempt.received += len(piece)
            self._pulse.beat()

        try:
            digest = await self._links.get_shard(
                followed.source,
                checkpoint_path(followed.name, f"shards/{index}"),
                take,
                expected_bytes=attempt.length,
                timeout_s=self._shard_timeout_s(attempt.length),
            )
            await trio.to_thread.run_sync(sink.finish, digest)
        finally:
            if sink.is_open:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(sink.close)
            self._links.count(peer, attempt.received)
        self._took_s.append(time.monotonic() - attempt.began_at)
        self._links.balancer.succeeded(peer, bytes_count=attempt.length, seconds=self._took_s[-1])
        self._patching.savings.add_whole(attempt.length)

    def _failed(self, followed: Followed, index: int, why: str) -> None:
        self._pulse.last_word = why
        followed.lacks(index)

    def _shard_timeout_s(self, length: int) -> float:
        best = self._links.balancer.best_throughput()
        if best is None:
            return LONGEST_SHARD_S
        return min(LONGEST_SHARD_S, max(SHORTEST_SHARD_S, SLACK * length / best))

    def _report_progress(self, index: int) -> None:
        if self._on_progress is not None and self._partial.has(index):
            self._on_progress(self._partial.verified_bytes, self.draft.layout.total_bytes, dict(self._received))

    # ---------------------------------------------------------------------------------------------------- slow ones

    async def _watch_attempts(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            now = time.monotonic()
            for attempt in list(self._attempts.values()):
                if self._is_quicker_elsewhere(attempt, now):
                    peer = attempt.followed.source.peer
                    log.info("relay=%s shard=%d slow=yes action=ask-others", peer.short, attempt.index)
                    self._slow_at[attempt.index] = peer
                    attempt.scope.cancel()

    def _is_quicker_elsewhere(self, attempt: _Attempt, now: float) -> bool:
        balancer = self._links.balancer
        others = [
            peer
            for peer, each in self._sources.items()
            if each is not attempt.followed and each.held >> attempt.index & 1 and balancer.paused_s(peer) <= 0
        ]
        if not others or not attempt.whole or now - attempt.began_at < STEAL_AFTER_S:
            return False
        rates = [rate for peer in others if (rate := balancer.throughput(peer)) is not None]
        remaining_s = attempt.remaining_s(now)
        if not rates:
            return now - attempt.began_at > STEAL_UNKNOWN_AFTER_S and remaining_s > SLACK * STEAL_UNKNOWN_AFTER_S
        factor, spare_s = (STEAL_FACTOR, STEAL_SPARE_S) if self._is_starved() else (TRICKLE, TRICKLE_S)
        elsewhere_s = max(attempt.length / max(rates), statistics.median(self._took_s or [0.0]))
        return remaining_s > factor * elsewhere_s + spare_s


def random_bit(bits: int) -> int:
    """The number of one of the bits that are set, at random."""
    start = random.randrange(bits.bit_length())
    rest = bits >> start
    if not rest:
        rest, start = bits, 0
    return start + (rest & -rest).bit_length() - 1


def disk_error(error: OSError) -> DataDirError:
    return DataDirError(
        f"a checkpoint cannot be written to this node's data directory: {error}",
        hint="look at the disk's free space and permissions; the download goes on where it stopped",
    )
