"""A canary in the event loop: says when something has kept trio from running for a second or more.

Everything else then ran late as well: deadlines, answers, open streams. What blocks belongs in a thread or a process.
Time that the loop's thread waited for a core, because the machine had more to run than cores, is taken off where the
system tells it (Linux): that is no fault of the node's.
"""

from __future__ import annotations

import logging
import time
from array import array
from pathlib import Path
from typing import Any, Final

import trio

log = logging.getLogger(__name__)

PULSE_S: Final = 0.25
LAG_S: Final = 1.0
SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
COUNTED_MS: Final = 2000
"""Longer lags count as this one where shares of all pulses are asked for."""


def core_wait_s() -> float:
    """For how long this thread was ready to run and had no core, since it began (schedstat); 0 if unknown."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Canary:
    """Measures by how much the loop is late. `worst_s` is the longest so far."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.lags = 0
        self._pulses = array("Q", bytes(8 * (COUNTED_MS + 1)))
        """How many pulses were so many milliseconds late."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began, queued_s = time.monotonic(), core_wait_s()
            await trio.sleep(PULSE_S)
            self.note(time.monotonic() - began - PULSE_S - (core_wait_s() - queued_s))

    def note(self, lag_s: float) -> None:
        """Take in by how much the loop was late once."""
        self.worst_s = max(self.worst_s, lag_s)
        self._pulses[min(COUNTED_MS, max(0, round(lag_s * 1000)))] += 1
        if lag_s >= LAG_S:
            self.lags += 1
            log.warning("loop_lag seconds=%.1f times=%d next=find_what_blocked_the_network_process", lag_s, self.lags)

    def lag_ms(self, share: float) -> int:
        """The lag that this share of all pulses stayed within, in whole milliseconds; 0 before the first one."""
        left = share * sum(self._pulses)
        for lag_ms, count in enumerate(self._pulses):
            left -= count
            if left <= 0:
                return lag_ms
        return COUNTED_MS

    def describe(self) -> dict[str, Any]:
        """The loop as plain values. In the loop's own thread, for the number of its tasks."""
        return {
            "pulses": sum(self._pulses),
            "p50_ms": self.lag_ms(0.5),
            "p99_ms": self.lag_ms(0.99),
            "worst_ms": round(self.worst_s * 1000),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
        }
