"""Files that somebody named: read as far as they may be long, and only if they are files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from protocol.errors import ConfigError


def bytes_of(path: Path, what: str, *, max_bytes: int) -> bytes:
    """What a regular file holds: a pipe would be waited for, and a device has no end. Raises OSError, ConfigError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is no file that can be read as {what}", hint="name a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes} bytes; {what} never is")
    return data
