"""Disks that become full: a small file system in memory under a node's data directory where this is root.

Elsewhere its processes are forbidden to make files grow, which they meet as another error than a full disk's. What a
node wrote stays where it was written when the simulation is over.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from protocol.errors import NodeError
from simnet.interrupts import shielded
from simnet.netns import is_left_over, label
from simnet.tools import run_tool

log = logging.getLogger(__name__)

BALLAST: Final = ".ballast"
MAX_PROBLEM_CHARS: Final = 300


class Disks:
    """The data directories of those nodes that have a disk of their own, by node."""

    def __init__(self, wanted_mb: Mapping[str, tuple[Path, int]]) -> None:
        self._wanted = dict(wanted_mb)
        self._mounted: dict[str, Path] = {}
        self._limited: set[str] = set()
        self.notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Mount them, or note that this cannot be done."""
        if not self._wanted:
            return
        if os.geteuid() != 0 or shutil.which("mount") is None:
            self.notes = ("full disks are imitated by a limit on the size of files: this is not root",)
            return
        sweep()
        for node, (directory, size_mb) in self._wanted.items():
            directory.mkdir(parents=True, exist_ok=True)
            options = f"size={size_mb}m,mode=700"
            with shielded():
                run_tool(["mount", "-t", "tmpfs", "-o", options, f"{label()}{node}", str(directory)])
                self._mounted[node] = directory

    def fill(self, node: str, pids: Iterable[int]) -> None:
        """Leave no room on a node's disk."""
        directory = self._mounted.get(node)
        if directory is None:
            self._limited.add(node)
            return _limit_files(pids, 0)
        with (directory / BALLAST).open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))  # a page: there is no smaller room

    def free(self, node: str, pids: Iterable[int]) -> None:
        """Give the room back."""
        directory = self._mounted.get(node)
        if directory is None:
            self._limited.discard(node)
            return _limit_files(pids, resource.RLIM_INFINITY)
        (directory / BALLAST).unlink(missing_ok=True)

    def begun(self, node: str, pids: Iterable[int]) -> None:
        """A node was started: processes that come later have a full disk too; their children inherit the limit."""
        if node in self._limited:
            _limit_files(pids, 0)

    def close(self) -> None:
        """Put what was written in the place of what was mounted; nothing is raised, but noted."""
        while self._mounted:
            with shielded():  # an interrupt comes between two disks, and whoever closes again does the others
                node, directory = self._mounted.popitem()
                if problem := _put_away(directory):
                    self.notes += (f"what {node} wrote could not be copied from its disk in memory: {problem}",)


def _put_away(directory: Path) -> str:
    """Have a directory hold by itself what the file system mounted there holds, which is unmounted in any case.

    Returns what went wrong, or nothing. The directory is empty then: half a database tells of less than was there.
    """
    kept = directory.with_name(f"{directory.name}.kept")
    try:
        try:
            shutil.copytree(directory, kept, symlinks=True, ignore=shutil.ignore_patterns(BALLAST))
        finally:
            run_tool(["umount", "-l", str(directory)])
        directory.rmdir()
        kept.rename(directory)
    except (OSError, shutil.Error, NodeError) as error:
        log.warning("a disk could not be put away directory=%s error=%s", directory, error)
        return str(error)[:MAX_PROBLEM_CHARS] or type(error).__name__
    return ""


def sweep() -> None:
    """Unmount what simulations left behind that had no chance to."""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            source, target, *_ = line.split()
            if is_left_over(source):
                with suppress(NodeError):
                    run_tool(["umount", "-l", target.replace("\\040", " ")])


def _limit_files(pids: Iterable[int], size: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError, ValueError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size == resource.RLIM_INFINITY else size, hard))
