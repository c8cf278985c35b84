"""A node's directory: made for its owner alone, used by one node at a time, of a known layout.

The lock is the kernel's (flock): it ends with the process that holds it, however that process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from protocol.atomic import write_atomically
from protocol.errors import DataDirError

LAYOUT_VERSION: Final = 1
"""What lies where in a data directory. A node refuses a directory of a later version."""
LOCK_FILE: Final = "node.lock"
LAYOUT_FILE: Final = "layout"


class DataDir:
    """A locked data directory, held for as long as the `with` block lasts. Raises DataDirError on entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def __enter__(self) -> DataDir:
        make_directory(self.path)
        self._lock_fd = _lock(self.path / LOCK_FILE)
        try:
            _check_layout(self.path / LAYOUT_FILE)
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise DataDirError(
            f"{path.parent} is in use by another node (process {holder})",
            hint=f"give each node its own --data-dir, or stop the other one: kill {holder}",
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise disk_error(error, path) from error
    return descriptor


def _check_layout(path: Path) -> None:
    try:
        text = path.read_bytes()[:64].decode("ascii", "replace").strip()
    except FileNotFoundError:
        write_atomically(path, f"{LAYOUT_VERSION}\n".encode())
        return
    except OSError as error:
        raise disk_error(error, path) from error
    if text != str(LAYOUT_VERSION):
        raise DataDirError(
            f"{path.parent} was written by another release: layout {text!r} instead of {LAYOUT_VERSION}",
            hint="install the release that wrote it, or give a new --data-dir",
        )
