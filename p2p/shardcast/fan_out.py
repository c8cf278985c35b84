"""How often each shard leaves the trainer: a home link cannot feed every relay at once.

Each shard is for a few of the relays that ask, drawn by a hash of both, so that all of them have something that others
lack from the start and no relay's link feeds all the rest; what is not for a relay it gets from any other that has it
(p2p.shardcast.transfer). Nobody plans who feeds whom: when a relay comes or goes, only its own shards change hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from protocol.identity import PeerId

FAN_OUT: Final = 4
LAPSE_S: Final = 10.0
"""Longer than a relay is quiet while it waits for the next shard (p2p.shardcast.following.FOLLOW_WAIT_S)."""
MAX_STEPS: Final = 8
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


class Request(Protocol):
    """What is needed of an HTTP request."""

    @property
    def headers(self) -> Mapping[str, str]: ...


Admission = Callable[[Request, int, int], int]
"""(request, step of a checkpoint, shards) -> those of them that are for whoever asks; bit i stands for shard i."""


class FanOut:
    """Gives each shard of a checkpoint to `limit` of the relays that fetch it, at most.

    A relay counts as fetching until it has not been heard of for `lapse_s`: it has all that it needs, or it is gone.
    Used in the HTTP thread only.
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
        self._steps: dict[int, _Fetching] = {}

    def __call__(self, request: Request, step: int, shards: int) -> int:
        """Which of these shards this request's relay may fetch."""
        relay = self._holder(request.headers.get("Authorization", ""))
        if relay is None:
            return 0
        fetching = self._steps.setdefault(step, _Fetching(self._limit))
        while len(self._steps) > MAX_STEPS:
            del self._steps[min(self._steps)]
        now = self._clock()
        fetching.heard(relay, request, now)
        fetching.forget(now - self._lapse_s)
        return shards & fetching.share(relay, shards.bit_length())


class _Fetching:
    """The relays that fetch one checkpoint, and which shards are for which."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest: dict[PeerId, tuple[Any, float]] = {}
        """A relay's newest request, and when it came; that one still waits says nothing new."""
        self._shares: dict[PeerId, int] = {}
        self._shards = 0

    def heard(self, relay: PeerId, request: Request, now: float) -> None:
        latest = self._latest.get(relay)
        if latest is None:
            self._shares = {}
        if latest is None or latest[0] is not request:
            self._latest[relay] = request, now

    def forget(self, before: float) -> None:
        for relay in [relay for relay, (_, at) in self._latest.items() if at < before]:
            del self._latest[relay]
            self._shares = {}

    def share(self, relay: PeerId, shards: int) -> int:
        if len(self._latest) <= self._limit:
            return (1 << shards) - 1
        if not self._shares or shards > self._shards:
            self._shards = max(shards, 2 * self._shards)  # a checkpoint that is still being hashed grows
            self._shares = draw_shares(list(self._latest), self._shards, limit=self._limit)
        return self._shares.get(relay, 0)


def draw_shares(relays: list[PeerId], shards: int, *, limit: int) -> dict[PeerId, int]:
    """For each shard the `limit` relays whose hash with it is highest; by relay, as a number whose bit i is shard i."""
    keys = np.array([int.from_bytes(relay.public_key[-8:], "little") for relay in relays], dtype=np.uint64)
    scores = _mixed(keys[:, None] ^ _mixed(np.arange(1, shards + 1, dtype=np.uint64) * _GOLDEN))
    chosen = np.argpartition(scores, len(relays) - limit, axis=0)[len(relays) - limit :]
    held = np.zeros((len(relays), shards), dtype=np.uint8)
    np.put_along_axis(held, chosen, 1, axis=0)
    packed = np.packbits(held, axis=1, bitorder="little")
    return {relay: int.from_bytes(row.tobytes(), "little") for relay, row in zip(relays, packed, strict=True)}


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
