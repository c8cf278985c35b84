"""Leaving on a signal: Ctrl-C or SIGTERM once leaves gracefully within a deadline, twice leaves now."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable

import trio

log = logging.getLogger(__name__)

GRACE_S = 20.0


async def leave_on_signal(
    leave: Callable[[], object],
    *,
    grace_s: float = GRACE_S,
    leave_now: Callable[[int], object] = os._exit,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """On the first signal call `leave` (set an event, cancel a scope); on the second, or too late, end the process.

    Runs in the nursery of the whole node and is cancelled with it; when that happens within `grace_s`, the node has
    left gracefully. `leave_now` gets the exit code 128 + signal. Compute processes end with this one.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        number = await anext(signals)
        log.warning("leaving signal=%s grace_s=%g again=leaves-now", signal.Signals(number).name, grace_s)
        leave()
        with trio.move_on_after(grace_s):
            number = await anext(signals)
        log.error("leaving now signal=%s", signal.Signals(number).name)
        leave_now(128 + number)
