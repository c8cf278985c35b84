"""Which relay to ask for the next shard: at random, in proportion to expected throughput times success (SHARDCAST).

Both are exponential moving averages, started from a probe; success heals slowly, so that a relay that failed is tried
again. A failing relay is left alone for a moment that doubles; one that sent wrong bytes for much longer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.identity import PeerId

SMOOTHING: Final = 0.3
"""Weight of the newest observation in both averages."""
HEALING_S: Final = 120.0
"""Time constant with which a relay's success returns to 1."""
MIN_SHARE: Final = 0.02
"""Least weight of a relay relative to the best one: slow relays are still sampled, so that they can get better."""
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
MISDEED_PAUSE_S: Final = 60.0
BUSY_PAUSE_S: Final = 1.0


@dataclass
class _Record:
    """What is known of one relay; `throughput` in bytes a second, None before the first shard came through."""

    throughput: float | None = None
    success: float = 1.0
    failures_in_a_row: int = 0
    seen_at: float = 0.0
    paused_until: float = -math.inf


class Balancer:
    """Scores relays for one node; shared by its downloads. Not for several threads."""

    def __init__(
        self,
        *,
        misdeed_pause_s: float = MISDEED_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
        randomness: random.Random | None = None,
    ) -> None:
        self._misdeed_pause_s = misdeed_pause_s
        self._clock = clock
        self._random = randomness or random.Random()
        self._records: dict[PeerId, _Record] = {}

    def choose(self, relays: Sequence[PeerId], *, avoid: Collection[PeerId] = ()) -> PeerId | None:
        """A relay to ask now, one not in `avoid` if there is any; None while all of them are paused."""
        ready = [relay for relay in relays if self.paused_s(relay) <= 0]
        candidates = [relay for relay in ready if relay not in avoid] or ready
        if not candidates:
            return None
        return self._random.choices(candidates, weights=self.weights(candidates))[0]

    def weights(self, relays: Sequence[PeerId]) -> list[float]:
        """Expected throughput times success; an unknown relay is taken to be as good as the best until it is probed."""
        fastest = self.best_throughput() or 1.0
        raw = [(self._of(relay).throughput or fastest) * self._success(relay) for relay in relays]
        least = max(raw) * MIN_SHARE or 1.0
        return [max(weight, least) for weight in raw]

    def throughput(self, relay: PeerId) -> float | None:
        """Bytes a second over one connection; None before anything came through."""
        return self._of(relay).throughput

    def best_throughput(self) -> float | None:
        """Bytes a second of the fastest relay so far."""
        return max((each.throughput for each in self._records.values() if each.throughput is not None), default=None)

    def paused_s(self, relay: PeerId) -> float:
        """Seconds for which a relay is still to be left alone."""
        return max(0.0, self._of(relay).paused_until - self._clock())

    def succeeded(self, relay: PeerId, *, bytes_count: int, seconds: float) -> None:
        """A shard came through and its hash held."""
        self.did_well(relay)
        self.observed(relay, bytes_count=bytes_count, seconds=seconds)

    def did_well(self, relay: PeerId) -> None:
        """It gave what was asked for, which was too small to tell its throughput by."""
        self._observe(relay, 1.0).failures_in_a_row = 0

    def observed(self, relay: PeerId, *, bytes_count: int, seconds: float) -> None:
        """So much came in so long, of a shard that was then given up as too slow: neither success nor failure."""
        record = self._of(relay)
        rate = max(bytes_count, 1) / max(seconds, 1e-3)
        old = record.throughput
        record.throughput = rate if old is None else old + SMOOTHING * (rate - old)

    def busy(self, relay: PeerId, *, seconds: float = 0.0) -> None:
        """It serves others just now and said so, perhaps for how long, which is no failure."""
        self._of(relay).paused_until = self._clock() + max(seconds, BUSY_PAUSE_S)

    def failed(self, relay: PeerId) -> None:
        """No answer, a broken connection, silence: leave it alone for a moment. Says nothing about its throughput."""
        record = self._observe(relay, 0.0)
        record.failures_in_a_row += 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(record.failures_in_a_row - 1, 10))
        record.paused_until = self._clock() + pause * self._random.uniform(0.5, 1.0)

    def misbehaved(self, relay: PeerId) -> None:
        """It sent bytes that are not what was signed."""
        record = self._observe(relay, 0.0)
        record.success = 0.0
        record.paused_until = self._clock() + self._misdeed_pause_s

    def _observe(self, relay: PeerId, outcome: float) -> _Record:
        record = self._of(relay)
        success = self._success(relay)
        record.success = success + SMOOTHING * (outcome - success)
        record.seen_at = self._clock()
        return record

    def _success(self, relay: PeerId) -> float:
        record = self._of(relay)
        healed = math.exp((record.seen_at - self._clock()) / HEALING_S)
        return 1.0 - (1.0 - record.success) * healed

    def _of(self, relay: PeerId) -> _Record:
        return self._records.setdefault(relay, _Record(seen_at=self._clock()))
