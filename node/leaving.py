"""`intellect-node leave`: ask the node of a data directory to end, and say what it does until it has.

The node is found by the lock on its directory, never by a name: the signal goes to the process that holds the lock's
file open, and to no other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.datadir import LOCK_FILE
from node.homes import holder
from node.status_view import fetch_status, how_it_ended, last_status
from protocol.errors import DataDirError, NodeError

POLL_S: Final = 0.3
SECOND_AFTER_S: Final = 0.5
"""Between the two signals of `--now`: the node must have taken the first."""

Say = Callable[[str], None]


def leave(data_dir: Path, *, now: bool, timeout_s: float, say: Say) -> None:
    """Signal the node and wait for its end. Raises DataDirError when none runs, NodeError when it goes on."""
    process = holder(data_dir)
    if not process:
        raise DataDirError(f"no node runs in {data_dir}", hint="intellect-node run list shows those that run")
    _signal(data_dir, process)
    if now:
        time.sleep(SECOND_AFTER_S)
        if holder(data_dir) == process:
            _signal(data_dir, process)
    say(f"process {process} was asked to leave{' now' if now else '; again with --now ends it at once'}")
    if timeout_s:
        _wait(data_dir, process, timeout_s=timeout_s, say=say)


def _signal(data_dir: Path, process: int) -> None:
    if not _holds_lock(process, data_dir / LOCK_FILE):
        raise NodeError(
            f"a node runs in {data_dir}, but not as process {process} of this computer",
            hint="it may be in a container: leave it from there, with Ctrl-C or SIGINT",
        )
    try:
        os.kill(process, signal.SIGINT)
    except ProcessLookupError:
        return  # it has just ended by itself
    except PermissionError as error:
        raise NodeError(
            f"process {process} belongs to another user",
            hint=f"as its user: intellect-node leave --data-dir {data_dir}",
        ) from error


def _holds_lock(process: int, lock: Path) -> bool:
    """Whether a process has the lock's file open; believed where the system does not tell."""
    opened = Path(f"/proc/{process}/fd")
    if not Path("/proc/self/fd").exists():
        return process > 0
    try:
        return any(_is_same(each, lock) for each in opened.iterdir())
    except PermissionError:
        return True  # of another user, which the signal will tell
    except OSError:
        return False


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _wait(data_dir: Path, process: int, *, timeout_s: float, say: Say) -> None:
    ends_at, said = time.monotonic() + timeout_s, ""
    while holder(data_dir) == process:
        doing = _doing(data_dir)
        if doing and doing != said:
            say(doing)
            said = doing
        if time.monotonic() >= ends_at:
            raise NodeError(
                f"process {process} still runs after {timeout_s:g} s: {said or 'it does not say what it does'}",
                hint=f"wait, or end it at once: intellect-node leave --now --data-dir {data_dir}",
            )
        time.sleep(POLL_S)
    last = last_status(data_dir)
    say(f"it has {how_it_ended(last)}" if last else "it has left, and did not say how far it was")


def _doing(data_dir: Path) -> str:
    try:
        status = fetch_status(data_dir, timeout_s=2.0)
    except NodeError:
        return ""
    return f"{status.get('state')}: {status.get('activity')}"
