"""Which of the nodes with one key this is: a random number in the data directory, made at its first start.

A copy of the directory is another node, though it holds the same number: the file says where it lay when it was written
(device and inode), and elsewhere a new number is made. A restart in the same directory is the same node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.errors import DataDirError

FILE: Final = "instance"
INSTANCE_BYTES: Final = 16


class _Instance(msgspec.Struct, array_like=True):
    instance: Annotated[bytes, Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
    place: tuple[int, int]


def own_instance(data_dir: Path) -> bytes:
    """16 bytes, made when there are none of this very directory. Raises DataDirError."""
    path = data_dir / FILE
    try:
        with path.open("rb") as file:
            found = msgspec.msgpack.decode(file.read(1024), type=_Instance)
            if found.place == _place(file.fileno()):
                return found.instance
    except (OSError, msgspec.MsgspecError):
        pass  # none yet, or cut short by a power failure
    return _make(path)


def _make(path: Path) -> bytes:
    instance = os.urandom(INSTANCE_BYTES)
    try:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:  # no rename: it must lie where it says
            file.write(msgspec.msgpack.encode(_Instance(instance, _place(file.fileno()))))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataDirError(f"{path} cannot be written: {error.strerror}", hint=f"df -h {path.parent}") from error
    return instance


def _place(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
