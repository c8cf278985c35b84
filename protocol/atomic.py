"""Writing a small file so that a crash leaves the old content or the new, never a part."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from protocol.errors import DataDirError


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Write, fsync, rename. With `sync=False` a power cut may bring the old content back. Raises DataDirError."""
    try:
        replace_whole(path, data, mode=mode, sync=sync)
    except OSError as error:
        raise write_refused(path, error) from error


def replace_whole(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """The same for callers that have words of their own. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_directory(path.parent)
    except OSError:
        with suppress(OSError):  # a disk that has become read-only refuses this as well
            temporary.unlink(missing_ok=True)
        raise


def write_refused(path: Path, error: OSError) -> DataDirError:
    """What a person should read when this computer's disk does not take a file."""
    return DataDirError(
        f"cannot write {path}: {error.strerror or error}",
        hint=f"check free space and permissions (`df -h {path.parent}`, `ls -ld {path.parent}`)",
    )


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
