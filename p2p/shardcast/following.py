"""Whom a download asks, and how far the checkpoint is at each of them (SHARDCAST).

A follower for each of a few sources keeps asking by long polls; parts and manifest come that way too, while the trainer
still hashes. Fetching the shards is p2p.shardcast.transfer's work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from p2p.shardcast.draft import Draft
from p2p.shardcast.partial import PartialCheckpoint
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
from protocol.errors import MalformedError, ProtocolError, RefusedError, RelayError
from protocol.identity import PeerId
from protocol.records import CheckpointManifest, CheckpointPart

MAX_FOLLOWED: Final = 8
"""Sources at once; others take the place of those that fail."""
FOLLOW_WAIT_S: Final = 5.0
"""How long a source may hold back its answer for something new to say."""
POLL_S: Final = 0.25
"""Between two questions to a source that does not know the checkpoint yet."""
STRIKES: Final = 3
"""Failures in a row after which another source may take this one's place."""
LOOK_S: Final = 0.25


class Pulse:
    """What the tasks of one download tell each other: that there is news, that something came, and what was said."""

    def __init__(self) -> None:
        self.news = trio.Event()
        """Set, and replaced by the next one, at every change: take it before looking."""
        self.alive_at = time.monotonic()
        self.last_word = ""
        """Of whoever could not help."""

    def wake(self) -> None:
        self.news.set()
        self.news = trio.Event()

    def beat(self) -> None:
        """A byte that was of use has come."""
        self.alive_at = time.monotonic()


@dataclass(eq=False)
class Followed:
    """A source, and what it last said."""

    source: Source
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    held: int = 0
    """Shards that it has, as a number whose bit i stands for shard i."""
    name: bytes = b""
    """The id under which it knows the checkpoint; empty before it has said anything."""
    ask_again: trio.Event = field(default_factory=trio.Event)

    def lacks(self, index: int) -> None:
        """It did not give a shard that it said to have: ask it how far it is."""
        self.held &= ~(1 << index)
        self.ask_again.set()


class Following:
    """Keeps `sources` up to date while `run` runs.

    `on_answer` is called after each useful answer; `breath_s` tells how long a source is to be left alone after it had
    news of shards, and is asked again at every change.
    """

    def __init__(
        self,
        links: Links,
        store: CheckpointStore,
        rules: CheckpointRules,
        partial: PartialCheckpoint,
        *,
        pulse: Pulse,
        on_answer: Callable[[], None],
        on_disk_error: Callable[[OSError], None],
        breath_s: Callable[[], float],
    ) -> None:
        self.sources: dict[PeerId, Followed] = {}
        self._links = links
        self._store = store
        self._rules = rules
        self._partial = partial
        self._pulse = pulse
        self._on_answer = on_answer
        self._on_disk_error = on_disk_error
        self._breath_s = breath_s

    @property
    def _draft(self) -> Draft:
        return self._partial.draft

    async def run(self) -> None:
        """For ever: one follower for each of a few sources, those first that are not paused."""
        async with trio.open_nursery() as nursery:
            while True:
                known = {source.peer: source for source in self._links.sources()}
                for peer, followed in list(self.sources.items()):
                    if known.get(peer) != followed.source:
                        self._drop(followed)
                others = [source for peer, source in known.items() if peer not in self.sources]
                random.shuffle(others)
                others.sort(key=lambda source: self._links.balancer.paused_s(source.peer))
                for source in others[: MAX_FOLLOWED - len(self.sources)]:
                    followed = self.sources[source.peer] = Followed(source)
                    nursery.start_soon(self._follow, followed)
                await trio.sleep(LOOK_S)

    def _drop(self, followed: Followed) -> None:
        self.sources.pop(followed.source.peer, None)
        followed.scope.cancel()

    async def _follow(self, followed: Followed) -> None:
        strikes = 0
        with followed.scope:
            while strikes < STRIKES:
                held = followed.held
                pause_s = await self._ask(followed)
                strikes = 0 if pause_s is not None else strikes + 1
                if pause_s is None:
                    pause_s = POLL_S + self._links.balancer.paused_s(followed.source.peer)
                await trio.sleep(pause_s)
                if followed.held != held:  # otherwise the next answer waits for news where they are
                    await self._breathe()
                await self._worth_asking(followed)
        if self.sources.get(followed.source.peer) is followed:
            del self.sources[followed.source.peer]

    async def _worth_asking(self, followed: Followed) -> None:
        """Wait while the source has told all that it ever will, unless it then refuses a shard."""
        if self._draft.manifest is not None and followed.held.bit_count() == self._draft.layout.shards:
            followed.ask_again = trio.Event()
            await followed.ask_again.wait()

    async def _breathe(self) -> None:
        began = trio.current_time()
        while (left_s := began + self._breath_s() - trio.current_time()) > 0:
            news = self._pulse.news
            with trio.move_on_after(left_s):
                await news.wait()

    async def _ask(self, followed: Followed) -> float | None:
        """Learn how far a source is; how long to leave it alone then, or None when it failed."""
        peer = followed.source.peer
        try:
            standing = await self._standing(followed)
            await self._learn(standing)
            followed.held = standing.held_bits()
        except (RelayError, ProtocolError) as error:
            self._pulse.last_word = error.message
            followed.held = 0
            if isinstance(error, RefusedError) and error.code in NOT_HERE:
                return POLL_S
            if isinstance(error, ProtocolError):
                self._links.blame(peer, f"about checkpoint step {self._draft.layout.step}: {error.message}")
            return None
        except OSError as error:  # of this node's disk, which has no room for the manifest: no fault of the source's
            self._on_disk_error(error)
            return None
        self._on_answer()
        return 0.0

    async def _standing(self, followed: Followed) -> Standing:
        """Asks under the manifest's id, then under the plan's: a source may know either."""
        names = self._draft.ids
        for name in names:
            closed = self._draft.manifest is not None
            known = MAX_SHARDS if closed else len(self._draft.parts), followed.held.bit_count(), int(closed)
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
        shards = self._draft.layout.shards
        if standing.shards != shards:
            raise MalformedError(f"a checkpoint of {shards} shards is said to have {standing.shards}")
        news = self._learn_parts(standing.parts)
        if standing.manifest and self._draft.manifest is None:
            manifest = open_envelope(standing.manifest, CheckpointManifest)
            self._rules.check(manifest, step=self._draft.layout.step)
            if not self._draft.continues(manifest):
                raise MalformedError("a manifest that is not of the announced plan")
            self._store.close(manifest)
            news = True
        if news:
            self._pulse.beat()
        if news and self._partial.claims:
            await trio.to_thread.run_sync(self._partial.recheck)

    def _learn_parts(self, parts: list[bytes]) -> bool:
        plan = self._draft.plan
        if plan is None or self._draft.manifest is not None:  # a source may then have another plan of the same files
            return False
        news = False
        for data in parts:
            part = open_envelope(data, CheckpointPart)
            self._rules.check_part(part, plan.id)
            if part.record.number >= len(self._draft.parts):  # otherwise another source was quicker
                self._store.learn(plan.id, part)
                news = True
        return news
