"""Is this node well? Two answers for whoever watches it, each with reasons in words.

*Live*: the event loop turns; if not, restart the process. *Ready*: the node can do its part: it has joined the run,
hears from the trainer, is not evicted, and what it does does not take for ever. A trainer that is down makes every node
unready and none of them dead. Pure but for `run` and `process_facts`.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from node.clock import now_ms
from node.status import StatusBoard

BEAT_S: Final = 1.0
LOOP_STALL_S: Final = 60.0
"""An event loop that has not turned for so long does not come back."""
HEAD_STALE_S: Final = 120.0
"""The trainer signs its head anew every few seconds; relays hand it on by long polls."""
_RESTING: Final = frozenset({"finished", "stopping"})
_HEARERS: Final = frozenset({"relay", "inference", "validator", "watch"})
"""Roles that hear heads; the trainer makes them."""
_STEADY: Final = ("serving the run", "serving the finished run", "following step", "submissions at the relays")
"""Activities that may last: that nothing changes meanwhile is no stall."""
_OVER: Final = "serving the finished run"
"""A relay that is to stay: no trainer signs heads any more."""


@dataclass(frozen=True)
class Health:
    """`reasons` say why it is not ready, or not live; empty when all is well."""

    live: bool
    ready: bool
    reasons: tuple[str, ...] = ()
    head_age_s: float | None = None

    @property
    def well(self) -> bool:
        return self.live and self.ready

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        age = {} if self.head_age_s is None else {"head_age_s": round(self.head_age_s, 1)}
        return {"live": self.live, "ready": self.ready, "reasons": list(self.reasons), **age}


@dataclass
class HealthWatch:
    """Looks at a board once a second. `judge` may be called from any thread."""

    board: StatusBoard
    stall_after_s: float
    clock: Callable[[], int] = now_ms
    on_look: list[Callable[[Mapping[str, Any], Health], None]] = field(default_factory=list)
    """Called with what the board says and the health, after each look; must not block."""
    _beat_ms: int = field(init=False)
    _head: tuple[Any, int] = field(init=False)
    _progress: tuple[Any, int] = field(init=False)

    def __post_init__(self) -> None:
        self._beat_ms = self.clock()
        self._head = (None, self._beat_ms)
        self._progress = (None, self._beat_ms)
        self.look()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await trio.sleep(BEAT_S)

    def look(self) -> None:
        """Take in what the board says now; done by the event loop, so that it shows that the loop turns."""
        self._beat_ms = self.clock()
        said = self.board.brief()
        if said["head_sequence"] != self._head[0]:
            self._head = (said["head_sequence"], self._beat_ms)
        if (progress := _progress(said)) != self._progress[0]:
            self._progress = (progress, self._beat_ms)
        health = self.judge()
        for listener in self.on_look:
            listener(said, health)

    def judge(self) -> Health:
        """How the node is now."""
        said, now = self.board.brief(), self.clock()
        silent_s = (now - self._beat_ms) / 1000
        head_age_s = (now - self._head[1]) / 1000 if self._head[0] is not None else None
        dead = [f"the event loop stands still for {silent_s:.0f} s"] if silent_s > LOOP_STALL_S else []
        unready = [
            *_standing(said),
            *_deaf(said, head_age_s),
            *_stalled(said, (now - self._progress[1]) / 1000, self.stall_after_s),
        ]
        return Health(not dead, not dead and not unready, (*dead, *unready), head_age_s)


def _progress(said: Mapping[str, Any]) -> tuple[Any, ...]:
    """What changes while a node gets on."""
    rejected = sum((said.get("rejected") or {}).values())
    return (*(said[name] for name in ("state", "activity", "step", "checkpoint_step", "accepted", "pending")), rejected)


def _standing(said: Mapping[str, Any]) -> list[str]:
    if said["state"] == "evicted":
        return [f"evicted: {said['activity']}"]
    if said["state"] == "stopping":
        return [f"stopping: {said['activity']}"]
    if said["state"] == "starting" or said["step"] is None:
        return [f"not in the run yet: {said['activity']}"] if said["state"] != "finished" else []
    return []


def _deaf(said: Mapping[str, Any], head_age_s: float | None) -> list[str]:
    over = said["role"] not in _HEARERS or said["state"] in _RESTING or said["activity"] == _OVER
    if over or head_age_s is None or head_age_s < HEAD_STALE_S:
        return []
    return [f"no newer head for {head_age_s:.0f} s: the trainer is down, or no relay that has its head answers"]


def _stalled(said: Mapping[str, Any], same_for_s: float, after_s: float) -> list[str]:
    """A node that has changed nothing at all for long, neither its activity nor a count."""
    resting = said["state"] in {*_RESTING, "evicted"} or str(said["activity"]).startswith(_STEADY)
    if not after_s or same_for_s < after_s or resting:
        return []
    return [f"stalled: {said['state']} for {same_for_s:.0f} s: {said['activity']}"]


def process_facts(data_dir: Path) -> dict[str, float]:
    """What the operating system says of this process and of its disk."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    facts: dict[str, float] = {"cpu_s": round(used.ru_utime + used.ru_stime, 3)}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        facts["resident_bytes"] = pages * resource.getpagesize()
        facts["open_files"] = len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError, IndexError):  # no /proc: the peak is better than nothing
        facts["resident_bytes"] = used.ru_maxrss * 1024
    try:
        facts["disk_free_bytes"] = shutil.disk_usage(data_dir).free
    except OSError:
        return facts
    return facts
