"""A canary in the event loop: says when something has kept trio from running for a second or more.

Everything else then ran late as well: deadlines, answers, open streams. What blocks belongs in a thread or a process.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import trio

log = logging.getLogger(__name__)

PULSE_S: Final = 0.25
LAG_S: Final = 1.0


class Canary:
    """Measures by how much the loop is late. `worst_s` is the longest so far."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.lags = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            await trio.sleep(PULSE_S)
            self.note(time.monotonic() - began - PULSE_S)

    def note(self, lag_s: float) -> None:
        """Take in by how much the loop was late once."""
        self.worst_s = max(self.worst_s, lag_s)
        if lag_s >= LAG_S:
            self.lags += 1
            log.warning("loop_lag seconds=%.1f times=%d next=find_what_blocked_the_network_process", lag_s, self.lags)
