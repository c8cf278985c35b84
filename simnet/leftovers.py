"""Processes of simulations that were killed themselves (by SIGKILL, or for want of memory): found and ended.

Every process of a node is started with the simulation's label in its environment, and hands it on to those that it
starts. Only processes of this user that carry the label of a simulation that has ended are touched.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from typing import Final

from simnet.netns import is_left_over, label
from simnet.processes import ProcessKey, ProcessTable, key_of, variable_of

log = logging.getLogger(__name__)

SIMULATION_VARIABLE: Final = "SIMNET_SIMULATION"
"""Names this process and one of its nodes in the environment of that node's processes."""
GONE_WITHIN_S: Final = 2.0


def mark(node: str) -> dict[str, str]:
    """The variable by which a node's processes are known as this simulation's."""
    return {SIMULATION_VARIABLE: f"{label()}{node}"}


def sweep() -> int:
    """Kill what simulations left running that had no chance to end it, and wait for its end; how many there were."""
    with suppress(FileNotFoundError):  # systems without /proc show nobody's environment
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        killed = [key for pid in pids if (key := _end(pid)) is not None]
        deadline = time.monotonic() + GONE_WITHIN_S
        while ProcessTable().alive(killed) and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(killed)
    return 0


def _end(pid: int) -> ProcessKey | None:
    """Kill a process if it was left over; nothing where it was not, or has ended meanwhile."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)  # stands for this process alone, should its pid be used again from here on
        try:
            key = key_of(pid)
            if key is None or not _is_own(pid) or not is_left_over(variable_of(pid, SIMULATION_VARIABLE) or ""):
                return None
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            log.warning("process of an earlier simulation killed pid=%d", pid)
            return key
        finally:
            os.close(handle)
    return None


def _is_own(pid: int) -> bool:
    """Whether a process is this user's, and pids mean the same to it: what runs in a container is left alone."""
    if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
        return False
    return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
