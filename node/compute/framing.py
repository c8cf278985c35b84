"""Messages between a node's network process and its compute process: a length and one msgpack value.

Requests are `[id, method, params]`. Replies are `[id, "progress", value]`, then one of `[id, "result", value]` and
`[id, "error", text, hint, kind]`, where `kind` is the name of the NodeError that was raised, or empty. The first reply
of a fresh child is `[0, "ready", pid]`.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO, Final

import msgspec

from protocol.errors import ComputeError

HEADER: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = 256 << 20
"""Larger things travel as files: a frame is held in memory whole by both sides."""


def encode_frame(message: Any) -> bytes:
    """One message as it travels. Raises ComputeError when it cannot be encoded or is too large."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ComputeError(f"a message to or from a compute process cannot be encoded: {error}") from error
    return HEADER.pack(_bounded(len(body))) + body


def frame_length(header: bytes) -> int:
    """Bytes of the body that follows a header. Raises ComputeError above MAX_FRAME_BYTES."""
    return _bounded(HEADER.unpack(header)[0])


def _bounded(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise ComputeError(
            f"a message of {length} bytes between node and compute process; at most {MAX_FRAME_BYTES} are allowed",
            hint="pass large data as a file path",
        )
    return length


def decode_body(body: bytes | bytearray) -> Any:
    """The value of a frame's body. Raises ComputeError."""
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ComputeError(f"a compute process sent bytes that are not msgpack: {str(error)[:200]}") from error


def read_frame(stream: BinaryIO) -> Any:
    """Block for the next message. Raises EOFError when the other side is gone, ComputeError on a broken frame."""
    return decode_body(_read_exactly(stream, frame_length(_read_exactly(stream, HEADER.size))))


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if data is None or len(data) != count:
        raise EOFError("the other side closed the pipe")
    return data
