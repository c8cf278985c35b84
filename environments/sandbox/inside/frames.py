"""Messages over pipes, inside a box: 4 bytes of length, most significant first, and then so many bytes."""

from __future__ import annotations

import json
import os
import struct
from typing import Any


def read_message(descriptor: int) -> Any:
    """The next message, a JSON value. Raises EOFError when the other side is gone."""
    (length,) = struct.unpack(">I", _read(descriptor, 4))
    return json.loads(_read(descriptor, length))


def write_message(descriptor: int, message: Any, *payloads: bytes) -> None:
    """A JSON value, then byte strings, each a frame of its own."""
    frames = [json.dumps(message).encode(), *payloads]
    _write(descriptor, b"".join(struct.pack(">I", len(frame)) + frame for frame in frames))


def _read(descriptor: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
