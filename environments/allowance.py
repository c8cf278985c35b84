"""What judging several answers together may cost at most: CPU time and time on the clock, wherever it is spent.

Answers of one submission share an allowance, so that a hundred of them, each just within its own limits, hold up
nobody. What is not judged once it is used up is "could not tell".
"""

from __future__ import annotations

import threading
import time


class Allowance:
    """CPU-seconds and seconds from now on. For any number of threads."""

    def __init__(self, *, cpu_s: float, wall_s: float) -> None:
        self.cpu_s = cpu_s
        self.wall_s = wall_s
        self._spent_s = 0.0
        self._ends = time.monotonic() + wall_s
        self._lock = threading.Lock()

    def charge(self, cpu_s: float) -> None:
        """So much was spent."""
        with self._lock:
            self._spent_s += cpu_s

    @property
    def used_up(self) -> str:
        """Which of the two there is none left of, for a reason; empty while there is some of both."""
        if self._spent_s >= self.cpu_s:
            return f"the answers judged together used more than {self.cpu_s:g} CPU-seconds"
        if time.monotonic() >= self._ends:
            return f"the answers judged together took more than {self.wall_s:g} s"
        return ""
