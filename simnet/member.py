"""One node of a simulation as it is now: its directory, its process and those that descend from it, its past."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from simnet.meddle import Control
from simnet.processes import ProcessKey, Usage
from simnet.scenario import NodePlan


@dataclass(frozen=True)
class Past:
    """A process of a node that has ended; the times are wall-clock milliseconds."""

    pid: int
    started_ms: int
    ended_ms: int
    """At the latest: when that was noticed."""
    exit_code: int
    ended_by: str


@dataclass
class Member:
    """One node of the fleet."""

    plan: NodePlan
    directory: Path
    peer_id: str
    p2p_port: int
    http_port: int
    process: subprocess.Popen[bytes] | None = None
    ended_by: str = ""
    """What made the latest process end: a fault's action, `close`, or nothing that we did."""
    disk_full: bool = False
    """Whether there is no room on its disk; a process that is started on it may end by that, too."""
    offspring: set[ProcessKey] = field(default_factory=set)
    """Every descendant that was ever seen and may still run."""
    usage: Usage = field(default_factory=Usage)
    """Of all its processes, in all its lives."""
    multiaddr: str = ""
    """At which others reach it, if it is a relay."""
    started_s: float = 0.0
    """Monotonic time at which the latest process began."""
    started_ms: int = 0
    """The same in wall-clock milliseconds."""
    past: deque[Past] = field(default_factory=deque)
    """Its earlier processes, oldest first; whoever records them takes them out."""
    control: Control = field(default_factory=Control)
    """What is wrong with its clock and disk."""
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """For the network that it lies in: this thread's new sockets are its own."""

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        return self.directory / "log.txt"

    @property
    def settings_path(self) -> Path:
        return self.directory / "settings.toml"

    @property
    def control_path(self) -> Path:
        return self.directory / "control.json"

    @property
    def hook(self) -> Path:
        """The directory that has its processes obey `control`."""
        return self.directory / "meddled"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def gone(self) -> bool:
        """Whether its process has ended by itself: not for a plan that has it come back or stay away."""
        return self.process is not None and not self.running and self.ended_by not in ("kill", "leave")

    @property
    def answers(self) -> bool:
        """Whether its process has come as far as to show a status; from then on it takes signals as it should."""
        return (self.data_dir / "status.url").exists()

    @property
    def pids(self) -> list[int]:
        """Its own process and those that descend from it, as they were last seen."""
        own = [self.process.pid] if self.process is not None and self.running else []
        return own + [key.pid for key in self.offspring]

    def bury(self) -> None:
        """Remember how its process ended, before the next one takes its place."""
        if self.process is not None and (code := self.process.poll()) is not None:
            self.past.append(Past(self.process.pid, self.started_ms, time.time_ns() // 1_000_000, code, self.ended_by))
