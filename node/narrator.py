"""Telling a person what a node does while it does it: milestones as lines that stay, the present as one that changes.

In a terminal the present is the last line, with a bar for downloads. Without one, milestones and long waits go to the
log. All of it is read off the status board, so that `status`, the dashboard and this say the same.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import trio

from node.logs import printable
from node.status import StatusBoard
from node.words import count, size, span

log = logging.getLogger(__name__)

TERMINAL_TICK_S: Final = 0.5
LOG_TICK_S: Final = 2.0
FIRST_REMINDER_S: Final = 30.0
"""A wait is logged after this long, and again after twice as long each time."""
BAR_COLUMNS: Final = 20
_DETAILS: Final = ("relays_known", "download", "self_test", "first_accepted", "dashboard", "join")
JOIN_WITH: Final = "others join with: "
_MB: Final = 1e6


@dataclass(frozen=True)
class Told:
    """What one look at the board has to say."""

    milestones: list[str]
    present: str


class Story:
    """Finds what is new on a board, look by look. Pure but for what it remembers."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._state = ""
        self._holds_policy = False

    def look(self, status: dict[str, Any]) -> Told:
        details = status.get("details") or {}
        milestones = [*self._milestones(details, status), *self._ending(status)]
        self._before = {name: details.get(name) for name in _DETAILS}
        return Told(milestones, present(status))

    def _milestones(self, details: dict[str, Any], status: dict[str, Any]) -> Iterator[str]:
        before = self._before
        if details.get("dashboard") and not before.get("dashboard"):
            yield f"dashboard: {details['dashboard']}"
        if details.get("join") and not before.get("join"):
            yield f"{JOIN_WITH}{details['join']}"
        if details.get("relays_known") and not before.get("relays_known"):
            yield f"found the run and {count(details['relays_known'], 'relay')}"
        if status.get("checkpoint_step") is not None and not self._holds_policy:
            self._holds_policy = True  # the next ones are everyday life
            brought = f": {size(before['download']['total_bytes'])}" if before.get("download") else ""
            yield f"policy of step {status['checkpoint_step']} is here{brought}"
        if (test := details.get("self_test")) and not before.get("self_test"):
            yield f"self-check: {test['answers']} answers, {test['share']:.0%} of the tightest limit used; it can work"
        if (first := details.get("first_accepted")) and not before.get("first_accepted"):
            yield first_accepted(first)

    def _ending(self, status: dict[str, Any]) -> Iterator[str]:
        state = str(status.get("state"))
        if state != self._state and state in ("stopping", "finished", "evicted"):
            yield f"{state}: {status.get('activity')}"
        self._state = state


def first_accepted(first: dict[str, Any]) -> str:
    """The first work of this node that a validator took, and where the proof of it lies."""
    return (
        f"first work accepted: {first['rollouts']} rollouts of step {first['step']} ({first['tokens']} tokens), by "
        f"validator {first['validator']}; the relay's receipt and the verdict are kept in {first['kept']}; "
        f"show it: intellect-node verdict show {first['submission'][:12]} --data-dir {Path(first['kept']).parent}"
    )


def present(status: dict[str, Any]) -> str:
    """What the node does now, for what it waits and since when, in one line: since when comes before what is long."""
    for_s = max(0, (status.get("now_ms", 0) - status.get("since_ms", 0)) // 1000)
    download = (status.get("details") or {}).get("download")
    if status.get("state") == "waiting" and download:
        return f"downloading {progress_text(download)}"
    what = f"{status.get('state')} for {span(for_s)}: {status.get('activity')}"
    counts = f"{status.get('accepted')} accepted, {status.get('pending')} pending"
    return f"{what}; {counts}" if status.get("role") == "inference" else what


def progress_text(download: dict[str, Any]) -> str:
    """`45 %  5.6 of 12.3 MB  1.2 MB/s  4 s left  2 relays`."""
    done, total = download["bytes"], max(1, download["total_bytes"])
    parts = [f"{done / total:.0%}", f"{done / _MB:.1f} of {size(total)}", f"{download['bytes_per_s'] / _MB:.1f} MB/s"]
    if download.get("left_s") is not None:
        parts.append(f"{span(download['left_s'])} left")
    parts.append(count(len(download.get("by_relay") or {}), "relay"))
    return "  ".join(parts)


class TerminalLine:
    """A terminal whose last line changes. Log lines written through it appear above that line."""

    def __init__(self, out: TextIO, columns: Callable[[], int] | None = None) -> None:
        self._out = out
        self._columns = columns or (lambda: shutil.get_terminal_size().columns)
        self._shown = ""

    @classmethod
    def of(cls, out: TextIO) -> TerminalLine | None:
        """None where nobody looks, or the terminal cannot move its cursor."""
        usable = out.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "")
        return cls(out) if usable else None

    def write(self, text: str) -> int:
        self._out.write(f"{self._erase()}{text}")
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def show(self, text: str) -> None:
        """Replace the last line."""
        line = printable(text)[: max(1, self._columns() - 1)]
        self._out.write(f"{self._erase()}{line}")
        self._shown = line
        self._out.flush()

    def clear(self) -> None:
        self._out.write(self._erase())
        self._out.flush()

    def _erase(self) -> str:
        erase = "\r\x1b[2K" if self._shown else ""
        self._shown = ""
        return erase


def bar(share: float, columns: int) -> str:
    """`[#######-------]`, so that it shows in any locale."""
    done = round(min(1.0, max(0.0, share)) * columns)
    return f"[{'#' * done}{'-' * (columns - done)}]"


async def narrate(board: StatusBoard, terminal: TerminalLine | None) -> None:
    """Tell until cancelled."""
    tell = _Teller(terminal) if terminal is not None else _Logger()
    story = Story()
    try:
        while True:
            status = board.snapshot(without=("discovery",))
            tell(story.look(status), status)
            await trio.sleep(TERMINAL_TICK_S if terminal is not None else LOG_TICK_S)
    finally:
        status = board.snapshot(without=("discovery",))
        tell(story.look(status), status)
        if terminal is not None:
            terminal.clear()


class _Teller:
    def __init__(self, terminal: TerminalLine) -> None:
        self._terminal = terminal

    def __call__(self, told: Told, status: dict[str, Any]) -> None:
        for line in told.milestones:
            self._terminal.write(f"{time.strftime('%H:%M:%S')} {printable(line)}\n")
        download = (status.get("details") or {}).get("download")
        share = download["bytes"] / max(1, download["total_bytes"]) if download else math.nan
        drawn = f"{bar(share, BAR_COLUMNS)} " if told.present.startswith("downloading") else ""
        self._terminal.show(f"{drawn}{told.present}")


class _Logger:
    """Milestones, and what takes long, as log lines."""

    def __init__(self) -> None:
        self._since = 0
        self._next_s = FIRST_REMINDER_S

    def __call__(self, told: Told, status: dict[str, Any]) -> None:
        for line in told.milestones:
            log.info("%s", line, extra={"whole_peer_ids": line.startswith(JOIN_WITH)})
        since = int(status.get("since_ms", 0))
        if since != self._since:
            self._since, self._next_s = since, FIRST_REMINDER_S
        waited_s = (int(status.get("now_ms", 0)) - since) / 1000
        if status.get("state") == "waiting" and waited_s >= self._next_s:
            log.info("still %s", told.present)
            self._next_s *= 2
