"""Ends a process whose work has stopped for too long, so that the node starts another one and asks it again.

The kernel keeps the time and the signal's own effect ends the process, so it works where a thread would not: in native
code that waits for ever and never gives the interpreter back. What every thread was doing goes to the log first.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from types import TracebackType
from typing import Self


class Watchdog:
    """A context in which `feed` must be called at least every `limit_s` seconds. One at a time in a process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def feed(self) -> None:
        """The work goes on. Costs a system call."""
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    def __enter__(self) -> Self:
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=True)
        self.feed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
