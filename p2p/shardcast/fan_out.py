"""How many relays fetch a checkpoint from the trainer itself: a home link cannot feed every relay at once.

There is no plan of who feeds whom. The first relays that ask have a place each; the others see the signed records at
the origin, and get shards from any relay that has them (p2p.shardcast.transfer).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from protocol.identity import PeerId

FAN_OUT: Final = 4
LAPSE_S: Final = 10.0
"""Longer than a relay is quiet while it waits for the next shard (p2p.shardcast.transfer.FOLLOW_WAIT_S)."""
MAX_STEPS: Final = 8


class Request(Protocol):
    """What is needed of an HTTP request."""

    @property
    def headers(self) -> Mapping[str, str]: ...


class FanOut:
    """Lets a bounded number of relays fetch one checkpoint from the origin; the others get it from them.

    The first ones to ask are let in. A place is free again when its relay has not been heard of for `lapse_s`: it has
    all that it needs, or it is gone. Used in the HTTP thread only.
    """

    def __init__(
        self,
        holder: Callable[[str], PeerId | None],
        limit: int,
        *,
        lapse_s: float = LAPSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._limit = limit
        self._lapse_s = lapse_s
        self._clock = clock
        self._seen: dict[int, dict[PeerId, float]] = {}

    def __call__(self, request: Request, step: int) -> bool:
        """Whether this request's relay may fetch shards of a step's checkpoint; takes a place for it if one is free."""
        relay = self._holder(request.headers.get("Authorization", ""))
        return relay is not None and self.takes(relay, step)

    def takes(self, relay: PeerId, step: int) -> bool:
        """Whether a relay has a place, perhaps from now on."""
        now = self._clock()
        places = self._seen.setdefault(step, {})
        for other in [each for each, seen_at in places.items() if now - seen_at > self._lapse_s]:
            del places[other]
        if relay not in places and len(places) >= self._limit:
            return False
        places[relay] = now
        while len(self._seen) > MAX_STEPS:
            del self._seen[min(self._seen)]
        return True
