"""One download under way: what each source has, who fetches which shard from whom, and when to give up.

A follower for each of a few sources keeps asking how far the checkpoint is there; parts and manifest come that way,
while the trainer still hashes. Workers take a source by throughput and success, then a shard that it has, at random, so
that relays which pull at once have different shards to give each other. A shard that is far slower than it would be
elsewhere is fetched elsewhere.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.shardcast.draft import Draft
from p2p.shardcast.partial import PartialCheckpoint
from p2p.shardcast.patch_client import Patching
from p2p.shardcast.sources import (
    MAX_STANDING_BYTES,
    NOT_HERE,
    Links,
    Source,
    Standing,
    checkpoint_path,
    open_standing,
)
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.constants import MAX_SHARDS
from protocol.envelope import open_envelope
from protocol.errors import (
    DataDirError,
    MalformedError,
    NodeError,
    ProtocolError,
    RefusedError,
    RelayError,
)
from protocol.identity import PeerId
from protocol.records import CheckpointManifest, CheckpointPart

log = logging.getLogger(__name__)

MAX_FOLLOWED: Final = 8
"""Sources at once; others take the place of those that fail."""
FOLLOW_WAIT_S: Final = 5.0
"""How long a source may hold back its answer for something new to say."""
POLL_S: Final = 0.25
"""Between two questions to a source that does not know the checkpoint yet."""
BREATH_S: Final = 0.02
PLENTY_S: Final = 0.3
"""Between two questions to a source while there are shards to choose from."""
STRIKES: Final = 3
"""Failures in a row after which another source may take this one's place."""
LOOK_S: Final = 0.25
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
STEAL_FACTOR: Final = 3.0
STEAL_SPARE_S: Final = 1.0
"""Whoever has nothing else to fetch takes over a shard that would still need so many times what it needs elsewhere."""
TRICKLE: Final = 10.0
TRICKLE_S: Final = 5.0
"""The same while there is other work: only from a relay that is hopeless."""
MAX_AT_ONE: Final = 3
"""Shards at once from one source of several, so that each is whole, and can be passed on, sooner."""

OnProgress = Callable[[int, int, Mapping[PeerId, int]], None]


@dataclass(eq=False)
class _Followed:
    """A source, and what it last said."""

    source: Source
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    held: int = 0
    name: bytes = b""
    """The id under which it knows the checkpoint; empty before it has said anything."""
    ask_again: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False)
class _Attempt:
    """A shard on its way."""

    index: int
    followed: _Followed
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
        self._store = store
        self._rules = rules
        self._partial = partial
        self._patching = patching
        self._connections = connections
        self._patience_s = patience_s
        self._on_progress = on_progress
        self._followed: dict[PeerId, _Followed] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._slow_at: dict[int, PeerId] = {}
        """By shard, from whom it was taken away."""
        self._todo = 0
        """Shards that may be fetched and nobody fetches, as a number whose bit i stands for shard i."""
        self._shard_s = 0.0
        """How long the last shard took."""
        self._received: dict[PeerId, int] = {}
        self._alive_at = time.monotonic()
        self._said = ""
        self._failure: NodeError | None = None
        self._news = trio.Event()

    @property
    def draft(self) -> Draft:
        return self._partial.draft

    async def run(self) -> None:
        """Raises RelayError when nobody gives a byte for `patience_s`, DataDirError when this disk cannot take it."""
        await trio.to_thread.run_sync(self._partial.recheck)
        self._look_at_todo()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_all, nursery)
            nursery.start_soon(self._watch_attempts)
            for number in range(self._connections):
                nursery.start_soon(self._work, number)
            await self._until_over()
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _until_over(self) -> None:
        while not self._partial.is_whole and self._failure is None:
            news = self._news
            if (left_s := self._alive_at + self._patience_s - time.monotonic()) <= 0:
                self._failure = self._gave_up()
                return
            with trio.move_on_after(left_s):
                await news.wait()

    def _gave_up(self) -> RelayError:
        missing = self._partial.missing()
        what = f"shard {missing[0]}" if missing else "the manifest"
        said = self._said or ("none was ready to be asked" if self._links.sources() else "no relay is known")
        step = self.draft.layout.step
        return RelayError(f"no relay gave {what} of checkpoint step {step}; the last word was: {said}")

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _look_at_todo(self) -> None:
        self._todo = self._partial.wanted() & ~sum(1 << index for index in self._attempts)
        self._wake()

    # ---------------------------------------------------------------------------------------------------- following

    async def _follow_all(self, nursery: trio.Nursery) -> None:
        while True:
            sources = {source.peer: source for source in self._links.sources()}
            for peer, followed in list(self._followed.items()):
                if sources.get(peer) != followed.source:
                    self._unfollow(followed)
            others = [source for peer, source in sources.items() if peer not in self._followed]
            random.shuffle(others)
            others.sort(key=lambda source: self._links.balancer.paused_s(source.peer))
            for source in others[: MAX_FOLLOWED - len(self._followed)]:
                followed = self._followed[source.peer] = _Followed(source)
                nursery.start_soon(self._follow, followed)
            await trio.sleep(LOOK_S)

    def _unfollow(self, followed: _Followed) -> None:
        self._followed.pop(followed.source.peer, None)
        followed.scope.cancel()

    async def _follow(self, followed: _Followed) -> None:
        strikes = 0
        with followed.scope:
            while strikes < STRIKES:
                pause_s = await self._ask(followed)
                strikes = 0 if pause_s is not None else strikes + 1
                if pause_s is None:
                    pause_s = POLL_S + self._links.balancer.paused_s(followed.source.peer)
                await trio.sleep(pause_s)
                await self._until_starved()
                await self._worth_asking(followed)
        if self._followed.get(followed.source.peer) is followed:
            del self._followed[followed.source.peer]

    async def _worth_asking(self, followed: _Followed) -> None:
        """Wait while the source has told all that it ever will, unless it then refuses a shard."""
        if self.draft.manifest is not None and followed.held.bit_count() == self.draft.layout.shards:
            followed.ask_again = trio.Event()
            await followed.ask_again.wait()

    async def _ask(self, followed: _Followed) -> float | None:
        """Learn how far a source is; how long to leave it alone then, or None when it failed."""
        peer = followed.source.peer
        try:
            standing = await self._standing(followed)
            await self._learn(standing)
            followed.held = standing.held_bits()
        except RefusedError as error:
            self._said = error.message
            followed.held = 0
            return POLL_S if error.code in NOT_HERE else None
        except RelayError as error:
            self._said = error.message
            followed.held = 0
            return None
        except ProtocolError as error:
            self._said = error.message
            followed.held = 0
            self._links.blame(peer, f"about checkpoint step {self.draft.layout.step}: {error.message}")
            return None
        self._look_at_todo()
        return BREATH_S

    async def _until_starved(self) -> None:
        """While there are shards to choose from, sources are asked less often."""
        with trio.move_on_after(PLENTY_S):
            while not self._is_starved():
                news = self._news
                await news.wait()

    def _is_starved(self) -> bool:
        """Whether workers have nothing to choose from."""
        return not any(each.held & self._todo for each in self._followed.values())

    async def _standing(self, followed: _Followed) -> Standing:
        """Asks under the manifest's id, then under the plan's: a source may know either."""
        names = self.draft.ids
        for name in names:
            closed = self.draft.manifest is not None
            known = MAX_SHARDS if closed else len(self.draft.parts), followed.held.bit_count(), int(closed)
            wait_s = FOLLOW_WAIT_S if name == followed.name else 0.0
            query = "standing?parts={}&held={}&closed={}".format(*known) + f"&wait_s={wait_s:g}"
            try:
                response = await self._links.get(
                    followed.source, checkpoint_path(name, query), max_bytes=MAX_STANDING_BYTES, wait_s=wait_s
                )
            except RefusedError as error:
                if error.code in NOT_HERE and name != names[-1]:
                    continue
                raise
            followed.name = name
            return open_standing(response.body)
        raise RelayError("a checkpoint without a name")

    async def _learn(self, standing: Standing) -> None:
        """Take parts and manifest. Raises ProtocolError: whoever sent them is at fault."""
        if standing.shards != self.draft.layout.shards:
            raise MalformedError(f"a checkpoint of {self.draft.layout.shards} shards is said to have {standing.shards}")
        news = self._learn_parts(standing.parts)
        if standing.manifest and self.draft.manifest is None:
            manifest = open_envelope(standing.manifest, CheckpointManifest)
            self._rules.check(manifest, step=self.draft.layout.step)
            if not self.draft.continues(manifest):
                raise MalformedError("a manifest that is not of the announced plan")
            self._store.close(manifest)
            news = True
        if news:
            self._alive_at = time.monotonic()
            await trio.to_thread.run_sync(self._partial.recheck)

    def _learn_parts(self, parts: list[bytes]) -> bool:
        plan = self.draft.plan
        if plan is None or self.draft.manifest is not None:  # a source may then have another plan of the same files
            return False
        news = False
        for data in parts:
            part = open_envelope(data, CheckpointPart)
            self._rules.check_part(part, plan.id)
            if part.record.number >= len(self.draft.parts):  # otherwise another source was quicker
                self._store.learn(plan.id, part)
                news = True
        return news

    # ----------------------------------------------------------------------------------------------------- fetching

    async def _work(self, number: int) -> None:
        while True:
            news = self._news
            choice = self._choose() if number < self._useful_workers() else None
            if choice is None:
                with trio.move_on_after(LOOK_S):
                    await news.wait()
                continue
            try:
                await self._fetch(*choice)
            except OSError as error:  # of this node's disk: the network's are RelayErrors
                self._failure = disk_error(error)
                self._wake()

    def _useful_workers(self) -> int:
        """On a quick link one or two connections fill it, and the first shard is whole sooner when it comes alone."""
        longest_s = max((time.monotonic() - each.began_at for each in self._attempts.values()), default=0.0)
        if max(longest_s, self._shard_s) > QUICK_SHARD_S:
            return self._connections
        return FEW if self._partial.count else 1

    def _choose(self) -> tuple[_Followed, int] | None:
        balancer = self._links.balancer
        ready = {
            peer: each
            for peer, each in self._followed.items()
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

    def _is_full(self, followed: _Followed) -> bool:
        at_it = sum(attempt.followed is followed for attempt in self._attempts.values())
        return at_it >= MAX_AT_ONE and len(self._followed) > 1

    def _rarest(self, shards: int) -> int:
        """Those of the shards that one source alone has, if there are any: so that those who pull at once can share."""
        once = more = 0
        for each in self._followed.values():
            more |= once & each.held
            once |= each.held
        return shards & ~more or shards

    async def _fetch(self, followed: _Followed, index: int) -> None:
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
        self._wake()

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
            self._alive_at = time.monotonic()
            return True
        peer, throughput = followed.source.peer, balancer.best_throughput()
        received = await self._patching.fetch(attempt.index, peer, ask, throughput=throughput)
        if received is None:
            return False
        attempt.received = received
        self._alive_at = time.monotonic()
        balancer.did_well(peer)
        return True

    async def _fetch_whole(self, attempt: _Attempt) -> None:
        followed, index = attempt.followed, attempt.index
        peer = followed.source.peer
        sink = self._partial.sink(index)

        def take(piece: memoryview) -> None:
            sink.write(piece)
            attempt.received += len(piece)
            self._alive_at = time.monotonic()

        try:
            digest = await self._links.get_shard(
                followed.source,
                checkpoint_path(followed.name, f"shards/{index}"),
                take,
                expected_bytes=attempt.length,
                timeout_s=self._shard_timeout_s(attempt.length),
            )
            await trio.to_thread.run_sync(sink.commit, digest)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(sink.close)
            self._links.count(peer, attempt.received)
        self._shard_s = time.monotonic() - attempt.began_at
        self._links.balancer.succeeded(peer, bytes_count=attempt.length, seconds=self._shard_s)
        self._patching.savings.add_whole(attempt.length)

    def _failed(self, followed: _Followed, index: int, why: str) -> None:
        self._said = why
        followed.held &= ~(1 << index)
        followed.ask_again.set()

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
            for peer, each in self._followed.items()
            if each is not attempt.followed and each.held >> attempt.index & 1 and balancer.paused_s(peer) <= 0
        ]
        if not others or not attempt.whole or now - attempt.began_at < STEAL_AFTER_S:
            return False
        rates = [rate for peer in others if (rate := balancer.throughput(peer)) is not None]
        remaining_s = attempt.remaining_s(now)
        if not rates:
            return now - attempt.began_at > STEAL_UNKNOWN_AFTER_S and remaining_s > SLACK * STEAL_UNKNOWN_AFTER_S
        factor, spare_s = (STEAL_FACTOR, STEAL_SPARE_S) if self._is_starved() else (TRICKLE, TRICKLE_S)
        return remaining_s > factor * attempt.length / max(rates) + spare_s


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
