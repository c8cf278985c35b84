"""Messages on a libp2p stream: a varint length, then so many bytes. Many may follow one another on one stream.

Reads what has arrived at once, where libp2p's own helper reads the length byte by byte. A message that has begun must
end in time, however slowly its bytes come.
"""

from __future__ import annotations

from typing import Any, Final

import trio

MESSAGE_TIMEOUT_S: Final = 10.0
_MAX_VARINT_BYTES: Final = 5
_CHUNK_BYTES: Final = 64 * 1024


class FrameError(Exception):
    """Raised when a stream's bytes are no message."""


class OversizedError(FrameError):
    """Raised when a message is announced that is longer than the limit; nothing of it is read."""


class StalledError(FrameError):
    """Raised when a message has begun and does not end in time."""


class Frames:
    """Sends and receives messages over one stream, which it does not close."""

    def __init__(self, stream: Any, *, max_bytes: int) -> None:
        self.stream = stream
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    async def send(self, message: bytes) -> None:
        await self.stream.write(_varint(len(message)) + message)

    async def receive(self, *, idle_s: float) -> bytes | None:
        """The next message; None when the stream ends, or nothing comes within `idle_s`. Raises FrameError."""
        if not self._buffer:
            with trio.move_on_after(idle_s):
                await self._read()
            if not self._buffer:
                return None
        with trio.move_on_after(MESSAGE_TIMEOUT_S):
            return await self._rest()
        raise StalledError(f"a message did not end within {MESSAGE_TIMEOUT_S:g} s")

    async def _rest(self) -> bytes:
        while (header := _parse_varint(self._buffer)) is None:
            await self._read_more()
        length, used = header
        if length > self._max_bytes:
            raise OversizedError(f"a message of {length} bytes; at most {self._max_bytes} are taken")
        while len(self._buffer) < used + length:
            await self._read_more()
        message = bytes(self._buffer[used : used + length])
        del self._buffer[: used + length]
        return message

    async def _read_more(self) -> None:
        if not await self._read():
            raise FrameError(f"the stream ended {len(self._buffer)} bytes into a message")

    async def _read(self) -> bool:
        """Take in what has arrived; False at the stream's end, however libp2p says that."""
        try:
            data = await self.stream.read(_CHUNK_BYTES)
        except Exception as error:  # StreamEOF, StreamReset, StreamError and what yamux lets through
            if self._buffer:
                raise FrameError(f"the stream ended {len(self._buffer)} bytes into a message") from error
            return False
        self._buffer += data
        return bool(data)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _parse_varint(data: bytearray) -> tuple[int, int] | None:
    """The number that some bytes begin with and its length; None if it is cut short. Raises FrameError."""
    number = 0
    for index, byte in enumerate(data[:_MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, index + 1
    if len(data) >= _MAX_VARINT_BYTES:
        raise OversizedError("a length of more than five bytes")
    return None
