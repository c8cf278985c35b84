"""A large GET in a thread of its own: blocking sockets, one buffer, and a hash on the way.

aiohttp copies a body several times before a sink sees it; here it goes from the kernel into one buffer, from there into
hash and sink, and every step lets go of the interpreter lock. Only what servers of large files answer is understood: a
status, headers with a Content-Length, and the body. Connections are kept for the next request to the same place;
p2p.http.client translates what is raised here.
"""

from __future__ import annotations

import hashlib
import io
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, parse_headers
from typing import Final
from urllib.parse import urlsplit

FIRST_BYTES: Final = 1 << 16
MOST_BYTES: Final = 1 << 20
"""Pieces grow from the first to the second size while they come quickly, so that a slow link still shows progress."""
QUICK_S: Final = 0.05
MAX_IDLE: Final = 16
MAX_IDLE_S: Final = 10.0
"""Shorter than a server keeps a silent connection open."""
MAX_HEAD_BYTES: Final = 16384
MAX_ERROR_BYTES: Final = 8192

Sink = Callable[[memoryview], None]
Place = tuple[str, str, bytes]
"""Scheme, host with port, fingerprint of the certificate."""


class Refusal(Exception):
    """Raised when the server answers with anything but 200."""

    def __init__(self, status: int, retry_after: str, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.retry_after = retry_after
        self.body = body


class WrongLength(Exception):
    """Raised when the server offers, or sends, another number of bytes than was asked for."""

    def __init__(self, received: int, *, offered: bool = False) -> None:
        super().__init__(received)
        self.received = received
        self.offered = offered


class SinkFailed(Exception):
    """Raised when the sink could not take the bytes; `error` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class WrongCertificate(Exception):
    """Raised when the server shows another certificate than was signed for it."""

    def __init__(self, got: bytes, expected: bytes) -> None:
        super().__init__(got, expected)
        self.got = got
        self.expected = expected


@dataclass(frozen=True)
class Wanted:
    """What to GET and within which bounds."""

    url: str
    headers: Mapping[str, str]
    expected_bytes: int
    connect_timeout_s: float
    progress_timeout_s: float
    fingerprint: bytes = b""


class StreamPool:
    """Idle connections by place; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Place, list[tuple[float, socket.socket]]] = defaultdict(list)

    def take(self, place: Place) -> socket.socket | None:
        """A connection that was used a moment ago, or None."""
        with self._lock:
            while self._idle[place]:
                since, connection = self._idle[place].pop()
                if time.monotonic() - since < MAX_IDLE_S:
                    return connection
                connection.close()
        return None

    def give(self, place: Place, connection: socket.socket) -> None:
        with self._lock:
            idle = self._idle[place]
            idle.append((time.monotonic(), connection))
            while len(idle) > MAX_IDLE:
                idle.pop(0)[1].close()

    def close(self) -> None:
        with self._lock:
            for idle in self._idle.values():
                for _, connection in idle:
                    connection.close()
            self._idle.clear()


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: HTTPMessage
    start: bytes
    """Of the body, as far as it came with the headers."""


class Download:
    """One GET. `run` blocks and is called once, in any thread; `abort`, from another thread, makes it fail soon."""

    def __init__(self, pool: StreamPool, wanted: Wanted) -> None:
        parts = urlsplit(wanted.url)
        self._pool = pool
        self._wanted = wanted
        self._place: Place = (parts.scheme, parts.netloc, wanted.fingerprint)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._where = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self._lock = threading.Lock()
        self._aborted = False
        self._may_write = False
        self._connection: socket.socket | None = None

    def run(self, sink: Sink) -> bytes:
        """The body's SHA-256, after every byte has gone into `sink`.

        Raises Refusal, WrongLength, WrongCertificate, SinkFailed, OSError and HTTPException of the network, ValueError
        for a request that cannot be made, and what else `sink` raises.
        """
        request = self._request()
        kept = self._pool.take(self._place)
        answer = self._try_again_on(kept, request) if kept is not None else None
        connection = kept
        if connection is None or answer is None:
            connection = self._connect()
            answer = self._ask(connection, request)
        try:
            digest = self._read(connection, answer, sink)
        except BaseException:
            connection.close()
            raise
        if answer.headers.get("Connection", "").lower() == "close":
            connection.close()
        else:
            self._pool.give(self._place, connection)
        return digest

    def abort(self) -> bool:
        """Have `run` raise soon; harmless when it has ended. Whether it may still write into its sink meanwhile."""
        with self._lock:
            self._aborted = True
            connection = self._connection
        if connection is not None:
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)
        return self._may_write

    def _request(self) -> bytes:
        headers = {"Host": self._place[1], **self._wanted.headers}
        lines = [f"GET {self._target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if any(not line.isprintable() for line in lines):
            raise ValueError("a URL or header with control characters")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _try_again_on(self, connection: socket.socket, request: bytes) -> _Answer | None:
        """Use a connection that was kept; None when the server has closed it meanwhile."""
        try:
            return self._ask(connection, request)
        except (ConnectionError, HTTPException, ssl.SSLError):
            connection.close()
            return None

    def _connect(self) -> socket.socket:
        self._require_wanted()
        connection = socket.create_connection(self._where, timeout=self._wanted.connect_timeout_s)
        if self._place[0] != "https":
            return connection
        try:
            secure = _TLS.wrap_socket(connection)
        except BaseException:
            connection.close()
            raise
        shown = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").digest()
        if shown != self._wanted.fingerprint:
            secure.close()
            raise WrongCertificate(shown, self._wanted.fingerprint)
        return secure

    def _watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._require_wanted()
            self._connection = connection
            self._may_write = True

    def _require_wanted(self) -> None:
        if self._aborted:
            raise ConnectionAbortedError("the request was given up")

    def _ask(self, connection: socket.socket, request: bytes) -> _Answer:
        try:
            self._watch(connection)
            connection.settimeout(self._wanted.progress_timeout_s)
            connection.sendall(request)
            return _read_head(connection)
        except BaseException:
            connection.close()
            raise

    def _read(self, connection: socket.socket, answer: _Answer, sink: Sink) -> bytes:
        expected = self._wanted.expected_bytes
        length = answer.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise HTTPException("an answer without a length")
        if answer.status != 200:
            raise Refusal(
                answer.status,
                answer.headers.get("Retry-After", ""),
                _read_little(connection, answer.start, min(int(length), MAX_ERROR_BYTES)),
            )
        if int(length) != expected:
            raise WrongLength(int(length), offered=True)
        if len(answer.start) > expected:
            raise WrongLength(len(answer.start))
        return self._read_body(connection, answer.start, sink)

    def _read_body(self, connection: socket.socket, start: bytes, sink: Sink) -> bytes:
        expected = self._wanted.expected_bytes
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(MOST_BYTES, expected)))
        filled, received, size = len(start), len(start), FIRST_BYTES
        buffer[:filled] = start
        began = time.monotonic()
        while True:
            goal = min(size, filled + expected - received)
            while filled < goal:
                count = connection.recv_into(buffer[filled:goal])
                if not count:
                    raise WrongLength(received)
                filled += count
                received += count
            piece = buffer[:filled]
            digest.update(piece)
            self._give(piece, sink)
            if received == expected:
                return digest.digest()
            now = time.monotonic()
            size = min(2 * size, MOST_BYTES) if now - began < QUICK_S else size
            filled, began = 0, now

    def _give(self, piece: memoryview, sink: Sink) -> None:
        self._require_wanted()
        try:
            sink(piece)
        except OSError as error:
            raise SinkFailed(error) from error


def _read_head(connection: socket.socket) -> _Answer:
    """Status and headers of an answer. Raises HTTPException for what is not HTTP."""
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise HTTPException("an answer whose headers do not end")
        piece = connection.recv(MAX_HEAD_BYTES)
        if not piece:
            raise ConnectionResetError("the connection was closed before an answer")
        data += piece
    status, _, headers = bytes(data[: end + 4]).partition(b"\r\n")
    words = status.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
        raise HTTPException("an answer that is no HTTP")
    return _Answer(int(words[1]), parse_headers(io.BytesIO(headers)), bytes(data[end + 4 :]))


def _read_little(connection: socket.socket, start: bytes, length: int) -> bytes:
    data = bytearray(start[:length])
    while len(data) < length and (piece := connection.recv(length - len(data))):
        data += piece
    return bytes(data)


def _any_certificate() -> ssl.SSLContext:
    """Takes any certificate; which one it must be is checked by its fingerprint before a byte is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


_TLS: Final = _any_certificate()
