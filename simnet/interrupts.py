"""Ctrl-C at any moment: a KeyboardInterrupt, but never between starting a process and knowing of it.

SIGTERM and a closed terminal count as Ctrl-C, so that whoever stops a simulation leaves no nodes behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupts:
    """What the handlers know: how deep in shields the main thread is, and whether a signal waits for their end."""

    def __init__(self) -> None:
        self.shields = 0
        self.waiting = False

    def handle(self, _: int, __: FrameType | None) -> None:
        if self.shields:
            self.waiting = True
        else:
            raise KeyboardInterrupt


_interrupts: Final = _Interrupts()


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt. Does nothing outside the main thread.

    SIGHUP stays ignored where it is: `nohup` asks for that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in _SIGNALS if number != signal.SIGHUP or not deaf]
    before = {number: signal.signal(number, _interrupts.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shielded() -> Iterator[None]:
    """Keep an interrupt back until the end of the block, which must be short. Only the main thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _interrupts.shields += 1
    try:
        yield
    finally:
        _interrupts.shields -= 1
        if not _interrupts.shields and _interrupts.waiting:
            _interrupts.waiting = False
            raise KeyboardInterrupt  # in place of an error, too, which the interrupt may have brought about
