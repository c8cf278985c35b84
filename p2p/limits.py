"""Rates and budgets: token buckets by whom they hold back, bytes a day, and the pace of what is downloaded.

A bucket may go into debt: what an answer costs is known when it begins, and whoever is in debt is refused until it is
paid off. Memory is bounded: full buckets say nothing and are forgotten, then those that were used longest ago.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

MAX_BUCKETS: Final = 16_384
"""In one table; about 3 MB."""
DAY_S: Final = 86_400
DOWNLOAD_BURST_S: Final = 0.5
"""So little, that a line which is shared with people is free again at once."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Rate:
    """So much a second in the long run, and `burst` at once; 0 a second is no limit."""

    per_s: float
    burst: float

    @classmethod
    def with_burst(cls, per_s: float, seconds: float) -> Rate:
        """A rate whose burst is what `seconds` bring."""
        return cls(per_s, per_s * seconds)


@dataclass
class _Bucket:
    level: float
    at: float


class Buckets:
    """A token bucket for each key, all of one rate."""

    def __init__(self, rate: Rate, *, max_buckets: int = MAX_BUCKETS, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._max_buckets = max_buckets
        self._clock = clock
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, key: Hashable, amount: float) -> None:
        """Take an amount, into debt if need be."""
        if self._rate.per_s > 0 and amount > 0:
            self._bucket(key).level -= amount

    def wait_s(self, key: Hashable, amount: float = 0.0) -> float:
        """How long until `amount` can be taken, or a debt is paid off; 0 when now is fine. Takes nothing."""
        if self._rate.per_s <= 0 or key not in self._buckets:
            return 0.0
        missing = min(amount, self._rate.burst) - self._bucket(key).level
        return max(0.0, missing / self._rate.per_s)

    def _bucket(self, key: Hashable) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            self._make_room()
            bucket = self._buckets[key] = _Bucket(self._rate.burst, now)
        self._refill(bucket, now)
        self._buckets.move_to_end(key)
        return bucket

    def _refill(self, bucket: _Bucket, now: float) -> None:
        bucket.level = min(self._rate.burst, bucket.level + (now - bucket.at) * self._rate.per_s)
        bucket.at = now

    def _make_room(self) -> None:
        """The bucket that was used longest ago goes: the fullest ones are among them."""
        while len(self._buckets) >= self._max_buckets:
            self._buckets.popitem(last=False)


class DailyBudget:
    """Bytes that may be sent until midnight UTC; 0 a day is no limit."""

    def __init__(self, bytes_per_day: int, *, clock: Clock = time.time) -> None:
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._day = self._today()
        self._spent = 0

    @property
    def spent(self) -> tuple[int, int]:
        """The day, counted from 1970, and the bytes sent in it."""
        self._turn()
        return self._day, self._spent

    def restore(self, day: int, spent: int) -> None:
        """Count on from where an earlier process of today stopped."""
        if day == self._today():
            self._day, self._spent = day, max(self._spent, spent)

    def spend(self, count: int) -> None:
        self._turn()
        self._spent += count

    def wait_s(self) -> float:
        """How long until there is something to spend; 0 when there is."""
        self._turn()
        if self._bytes_per_day <= 0 or self._spent < self._bytes_per_day:
            return 0.0
        return DAY_S - math.fmod(self._clock(), DAY_S)

    def _turn(self) -> None:
        if self._day != self._today():
            self._day, self._spent = self._today(), 0

    def _today(self) -> int:
        return int(self._clock() // DAY_S)


class DownloadBudget:
    """What one node may download: bytes a second, paced, and bytes a day, counted. Safe from any thread."""

    def __init__(
        self,
        *,
        bytes_per_s: float = 0.0,
        bytes_per_day: int = 0,
        clock: Clock = time.monotonic,
        day_clock: Clock = time.time,
    ) -> None:
        self.bytes_per_day = bytes_per_day
        self._lock = threading.Lock()
        self._pace = Buckets(Rate.with_burst(bytes_per_s, DOWNLOAD_BURST_S), max_buckets=1, clock=clock)
        self._day = DailyBudget(bytes_per_day, clock=day_clock)

    @property
    def spent(self) -> tuple[int, int]:
        """The day, counted from 1970, and the bytes that came in it."""
        with self._lock:
            return self._day.spent

    def restore(self, day: int, spent: int) -> None:
        """Count on from where an earlier process of today stopped."""
        with self._lock:
            self._day.restore(day, spent)

    def take(self, count: int) -> float:
        """Count bytes that came; for how many seconds to read no more of them, so that the rate holds."""
        with self._lock:
            self._day.spend(count)
            self._pace.charge("", count)
            return self._pace.wait_s("")

    def wait_s(self) -> float:
        """How long until something new may be begun: what the day allows is not spent. 0 when now is fine."""
        with self._lock:
            return self._day.wait_s()
