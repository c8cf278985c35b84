"""A node's directory: made for its owner alone, used by one node at a time, of a known layout.

The lock is the kernel's (flock): it ends with the process that holds it, however that process ends. Layouts are
numbered. A directory of an older one is brought up step by step (node.layouts), one of a newer one is refused, and the
file `layout` says which release wrote it last.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from node.layouts import bring_up_to_date
from protocol.errors import DataDirError

LOCK_TRIES: Final = 3
LOCK_RETRY_S: Final = 0.02
LOCK_FILE: Final = "node.lock"


class DataDir:
    """A locked data directory, held for as long as the `with` block lasts. Raises DataDirError on entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def __enter__(self) -> DataDir:
        make_directory(self.path)
        self._lock_fd = _lock(self.path / LOCK_FILE)
        try:
            bring_up_to_date(self.path)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unlock()

    def sub(self, name: str) -> Path:
        """A directory inside it, made when missing."""
        path = self.path / name
        make_directory(path)
        return path

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1


def make_directory(path: Path) -> None:
    """Make a directory, for its owner alone, and check that it can be written. Raises DataDirError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise disk_error(PermissionError(errno.EACCES, "Permission denied"), path)


def disk_error(error: OSError, path: Path) -> DataDirError:
    """What a person should read when the disk refuses a write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataDirError(f"no space is left for {path}", hint=f"free some (df -h {path.parent}), then start again")
    if error.errno == errno.EROFS:
        return DataDirError(f"{path} is on a read-only file system", hint="give another --data-dir")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DataDirError(
            f"{path} cannot be written by this user",
            hint=f"look at its owner (ls -ld {path}), or give another --data-dir",
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return DataDirError(f"{path} is not a directory", hint="give another --data-dir")
    return DataDirError(f"{path} cannot be written: {error.strerror or error}", hint="give another --data-dir")


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        _take(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise DataDirError(
            f"{path.parent} is in use by another node (process {holder})",
            hint="give each node its own --data-dir, or have the other one leave: "
            f"intellect-node leave --data-dir {path.parent}",
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise disk_error(error, path) from error
    return descriptor


def _take(descriptor: int) -> None:
    """Raises BlockingIOError. Whoever only asks whether a node runs holds the lock for a moment (node.homes.holder)."""
    for _ in range(LOCK_TRIES - 1):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_RETRY_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
