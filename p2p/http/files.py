"""Sending parts of files: by sendfile in clear, in pieces under TLS, and never longer than a client keeps reading."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Final, NamedTuple

from aiohttp import web

log = logging.getLogger(__name__)

OCTETS: Final = "application/octet-stream"
PIECE_BYTES: Final = 1 << 20
MOST_BYTES: Final = 1 << 24
QUICK_S: Final = 0.1
"""In clear, pieces grow from the first size to the second while a client takes them so quickly."""
TLS_PIECE_BYTES: Final = 1 << 18
"""asyncio's TLS is fastest with this much at once: `python -m bench door`."""
STALL_TIMEOUT_S: Final = 30.0


class FileRange(NamedTuple):
    """Bytes of an open file, to be sent."""

    file: BinaryIO
    offset: int
    length: int


async def send_ranges(
    request: web.Request,
    ranges: Sequence[FileRange],
    *,
    content_type: str = OCTETS,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> web.StreamResponse:
    """Answer with ranges of files laid end to end; honours a Range header (206, 416).

    A client that does not take a piece within `stall_timeout_s` is cut off: a MiB, or more once it has shown that it is
    quick. The caller closes the files.
    """
    wanted = _requested_range(request, sum(each.length for each in ranges))
    response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
    response.content_type = content_type
    response.content_length = len(wanted)
    response.headers["Accept-Ranges"] = "bytes"
    if response.status == 206:
        total = sum(each.length for each in ranges)
        response.headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{total}"
    await response.prepare(request)
    for each in _cut(ranges, wanted):
        await _send_range(request, response, each, stall_timeout_s)
    await response.write_eof()
    return response


def _requested_range(request: web.Request, total: int) -> range:
    try:
        wanted = request.http_range
    except ValueError as error:
        raise web.HTTPRequestRangeNotSatisfiable from error
    part = range(total)[wanted]
    if total and not part:
        raise web.HTTPRequestRangeNotSatisfiable
    return part


def _cut(ranges: Iterable[FileRange], wanted: range) -> Iterator[FileRange]:
    """The part `wanted` of ranges laid end to end."""
    start = 0
    for file, offset, length in ranges:
        low, high = max(wanted.start, start), min(wanted.stop, start + length)
        if low < high:
            yield FileRange(file, offset + low - start, high - low)
        start += length


async def _send_range(
    request: web.Request, response: web.StreamResponse, whole: FileRange, stall_timeout_s: float
) -> None:
    file, offset, left = whole
    size = PIECE_BYTES
    while left:
        piece = FileRange(file, offset, min(size, left))
        began = time.monotonic()
        await _send_piece(request, response, piece, stall_timeout_s)
        if not request.secure and time.monotonic() - began < QUICK_S:
            size = min(2 * size, MOST_BYTES)
        offset, left = offset + piece.length, left - piece.length


async def _send_piece(
    request: web.Request, response: web.StreamResponse, piece: FileRange, stall_timeout_s: float
) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has gone")
    try:
        async with asyncio.timeout(stall_timeout_s):
            sent = await (_write if request.secure else _sendfile)(transport, response, piece)
    except (TimeoutError, RuntimeError) as error:  # RuntimeError: the transport was closed under our feet
        transport.abort()
        raise ConnectionResetError("the client stopped reading") from error
    if sent != piece.length:
        log.error("served_file=%s sent=%d expected=%d cause=truncated", piece.file.name, sent, piece.length)
        transport.abort()
        raise ConnectionResetError("a served file is shorter than it was")


async def _sendfile(transport: asyncio.Transport, _: web.StreamResponse, piece: FileRange) -> int:
    loop = asyncio.get_running_loop()
    return await loop.sendfile(transport, piece.file, piece.offset, piece.length)


async def _write(_: asyncio.Transport, response: web.StreamResponse, piece: FileRange) -> int:
    data = memoryview(await asyncio.to_thread(os.pread, piece.file.fileno(), piece.length, piece.offset))
    for at in range(0, len(data), TLS_PIECE_BYTES):
        await response.write(data[at : at + TLS_PIECE_BYTES])
    return len(data)
