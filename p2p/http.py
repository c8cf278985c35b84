"""HTTP for the rest of the program: a client that trio code awaits, a server that runs in a trio nursery.

Both live on p2p.bridge's asyncio thread; aiohttp's errors are translated here and nowhere else. Handlers are asyncio
code: they build answers with `msgpack_response` and raise this program's errors, which the server turns into an error
body `{"code", "message", "hint"}`. Bodies that stream are checked where they are consumed (p2p.shardcast, node.relay).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
import trio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2p.bridge import AioThread
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.errors import (
    ChecksumError,
    ClockError,
    LedgerError,
    MalformedError,
    NodeError,
    PortError,
    ProtocolError,
    RefusedError,
    RelayError,
    SignatureError,
    StaleRecordError,
    VersionError,
    WrongAuthorError,
    WrongRunError,
)

log = logging.getLogger(__name__)

MSGPACK: Final = "application/msgpack"
OCTETS: Final = "application/octet-stream"
CHUNK_BYTES: Final = 1 << 18
PIECE_BYTES: Final = 1 << 20
CONNECT_TIMEOUT_S: Final = 10.0
PROGRESS_TIMEOUT_S: Final = 5.0
IDLE_TIMEOUT_S: Final = 30.0
"""A connection that sends no whole request for this long is closed."""
STALL_TIMEOUT_S: Final = 30.0
SHUTDOWN_S: Final = 1.0
MAX_ERROR_BYTES: Final = 8192
MAX_BODY_BYTES: Final = MAX_ENVELOPE_BYTES + 4096
MAX_CONNECTIONS: Final = 768
MAX_CONNECTIONS_PER_HOST: Final = 512

_PROTOCOL_CODES: Final[tuple[tuple[type[ProtocolError], int, str], ...]] = (
    (MalformedError, 400, "malformed"),
    (SignatureError, 400, "bad-signature"),
    (WrongAuthorError, 403, "wrong-author"),
    (WrongRunError, 409, "wrong-run"),
    (VersionError, 400, "wrong-version"),
    (ClockError, 400, "bad-clock"),
    (StaleRecordError, 409, "stale"),
    (ChecksumError, 400, "bad-hash"),
    (LedgerError, 409, "ledger"),
)
_STATUS_OF_CODE: Final[Mapping[str, int]] = {
    "unauthorized": 401,
    "evicted": 403,
    "not-found": 404,
    "not-yet": 404,
    "no-manifest": 404,
    "timeout": 408,
    "too-large": 413,
    "busy": 429,
    "disk-full": 507,
}
_CODE_OF_STATUS: Final[Mapping[int, str]] = {
    404: "not-found",
    405: "not-allowed",
    413: "too-large",
    416: "bad-range",
    417: "malformed",
}


# ---------------------------------------------------------------------------------------------------------- answers


def msgpack_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer with a msgpack body; `bytes` are sent as they are (an envelope is msgpack already)."""
    body = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return web.Response(body=body, status=status, content_type=MSGPACK, headers=headers)


def error_response(status: int, code: str, message: str, hint: str = "") -> web.Response:
    """An answer that says why not: `code` for programs, `message` and `hint` for people."""
    said = {"code": code, "message": _printable(message), "hint": _printable(hint)}
    return msgpack_response(said, status=status)


async def read_body(request: web.Request, *, max_bytes: int = MAX_BODY_BYTES, timeout_s: float = 10.0) -> bytes:
    """A request's whole body. Raises RefusedError "too-large" or "timeout"."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in body_chunks(request, max_bytes=max_bytes, progress_timeout_s=timeout_s):
                body += chunk
    except TimeoutError as error:
        raise RefusedError(f"the request's body took longer than {timeout_s:g} s", code="timeout") from error
    return bytes(body)


async def body_chunks(
    request: web.Request, *, max_bytes: int, progress_timeout_s: float = PROGRESS_TIMEOUT_S
) -> AsyncIterator[bytes]:
    """A request's body in pieces as they arrive. Raises RefusedError "too-large" or "timeout"."""
    received = 0
    if (request.content_length or 0) > max_bytes:
        raise RefusedError(f"a body of {request.content_length} bytes; at most {max_bytes} are taken", code="too-large")
    while True:
        try:
            async with asyncio.timeout(progress_timeout_s):
                chunk = await request.content.readany()
        except TimeoutError as error:
            raise RefusedError(f"no data for {progress_timeout_s:g} s", code="timeout") from error
        if not chunk:
            return
        received += len(chunk)
        if received > max_bytes:
            raise RefusedError(f"the body has more than the {max_bytes} bytes that are taken", code="too-large")
        yield chunk


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
    """Answer with ranges of files laid end to end, by sendfile; honours a Range header (206, 416).

    A client that does not take a MiB within `stall_timeout_s` is cut off. The caller closes the files.
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
        await _send_range(request, each, stall_timeout_s)
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
    """The part `wanted` of ranges laid end to end, in pieces that a client takes one at a time."""
    start = 0
    for file, offset, length in ranges:
        low, high = max(wanted.start, start), min(wanted.stop, start + length)
        for at in range(low, high, PIECE_BYTES):
            yield FileRange(file, offset + at - start, min(PIECE_BYTES, high - at))
        start += length


async def _send_range(request: web.Request, piece: FileRange, stall_timeout_s: float) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has gone")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(stall_timeout_s):
            sent = await loop.sendfile(transport, piece.file, piece.offset, piece.length)
    except (TimeoutError, RuntimeError) as error:  # RuntimeError: the transport was closed under our feet
        transport.abort()
        raise ConnectionResetError("the client stopped reading") from error
    if sent != piece.length:
        log.error("served_file=%s sent=%d expected=%d cause=truncated", piece.file.name, sent, piece.length)
        transport.abort()
        raise ConnectionResetError("a served file is shorter than it was")


# ----------------------------------------------------------------------------------------------------------- server


class BoundAddress(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class HttpServer:
    """Serves `routes` on one address. `run` is started in a nursery; cancelling it closes the server within seconds.

    Give port 0 for any free port. `middlewares` are aiohttp's (`@web.middleware`); they see a request before its
    handler does, and may raise this program's errors as handlers may.
    """

    def __init__(
        self,
        aio: AioThread,
        routes: Iterable[web.AbstractRouteDef],
        *,
        host: str,
        port: int,
        middlewares: Iterable[Middleware] = (),
        max_connections: int = MAX_CONNECTIONS,
        max_connections_per_host: int = MAX_CONNECTIONS_PER_HOST,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self._aio = aio
        self._routes = list(routes)
        self._middlewares = [_answer_errors, *middlewares]
        self._host, self._port = host, port
        self._limits = max_connections, max_connections_per_host
        self._idle_timeout_s = idle_timeout_s

    async def run(self, *, task_status: trio.TaskStatus[BoundAddress] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; the task status gives the bound address. Raises PortError."""
        sock = await trio.to_thread.run_sync(listening_socket, self._host, self._port)
        address = BoundAddress(*sock.getsockname()[:2])
        try:
            with trio.CancelScope(shield=True):  # quick; a cancelled start would leave a server behind
                listener, runner = await self._aio.run(self._start, sock)
        except BaseException:
            sock.close()
            raise
        try:
            task_status.started(address)
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(SHUTDOWN_S + 5, shield=True):
                await self._aio.run(_stop, listener, runner)

    async def _start(self, sock: socket.socket) -> tuple[asyncio.Server, web.AppRunner]:
        app = web.Application(middlewares=self._middlewares, client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._routes)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=self._idle_timeout_s,
            lingering_time=2.0,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        server = runner.server
        if server is None:
            raise NodeError("the HTTP server did not start")
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Gate(server, *self._limits), sock=sock), runner


async def _stop(listener: asyncio.Server, runner: web.AppRunner) -> None:
    listener.close()
    await runner.cleanup()


class _Gate(asyncio.Protocol):
    """Counts connections before aiohttp sees them, so that one address cannot use them all up in silence."""

    def __init__(self, server: web.Server, max_connections: int, max_per_host: int) -> None:
        self._server = server
        self._max_connections = max_connections
        self._max_per_host = max_per_host

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"not a stream transport: {transport!r}")
        if self._is_full(_peer_host(transport)):
            transport.abort()
            return
        protocol = self._server()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def _is_full(self, host: str) -> bool:
        connections = self._server.connections
        if len(connections) >= self._max_connections:
            return True
        if len(connections) < self._max_per_host:
            return False
        return sum(_peer_host(each.transport) == host for each in connections) >= self._max_per_host


def _peer_host(transport: asyncio.BaseTransport | None) -> str:
    name = transport.get_extra_info("peername") if transport is not None else None
    return str(name[0]) if name else ""


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises into an error body; the boundary that keeps a request's fault to that request."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        code = _CODE_OF_STATUS.get(error.status, f"http-{error.status}")
        return error_response(error.status, code, f"{request.method} {request.path[:200]}: {error.reason}")
    except NodeError as error:
        return _answer_to(error)
    except ConnectionError:
        raise  # the client has gone: aiohttp ends the connection quietly
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error_response(507, "disk-full", "no space is left on this node's disk", "try another relay")
        return _internal_error(request)
    except Exception:
        return _internal_error(request)


def _answer_to(error: NodeError) -> web.Response:
    if isinstance(error, RefusedError):
        return error_response(_STATUS_OF_CODE.get(error.code, 409), error.code, error.message, error.hint)
    for kind, status, code in _PROTOCOL_CODES:
        if isinstance(error, kind):
            return error_response(status, code, error.message, error.hint)
    log.warning("answer=500 error=%s message=%s", type(error).__name__, error.message[:500])
    return error_response(500, "internal", "this node could not do it; its log says why")


def _internal_error(request: web.Request) -> web.Response:
    log.exception("answer=500 request=%r", f"{request.method} {request.path}"[:200])
    return error_response(500, "internal", "this node failed at it; its log says why")


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket that no other program shares. Raises PortError naming the port, the cause and the remedy."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise PortError(f"there is no port {port}", hint="give a port from 1024 to 65535, or 0 for any free one")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise PortError(f"no address to listen on called {host!r}: {error}", hint="give an IP address") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # takes over from connections in TIME_WAIT only
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _port_error(host, port, error) from error
    return sock


def _port_error(host: str, port: int, error: OSError) -> PortError:
    number = error.errno
    if number == errno.EADDRINUSE:
        return PortError(
            f"port {port} on {host} is taken: another program, or another node of yours, listens there",
            hint=f"see who has it with `ss -ltnp 'sport = :{port}'`, or give another port",
        )
    if number == errno.EACCES:
        return PortError(f"port {port} needs administrator rights", hint="give a port from 1024 to 65535")
    if number == errno.EADDRNOTAVAIL:
        return PortError(
            f"cannot listen on {host}: this computer has no such address", hint="give 0.0.0.0 or a local address"
        )
    return PortError(f"cannot listen on {host} port {port}: {error}", hint="give another address or port")


# ----------------------------------------------------------------------------------------------------------- client


@dataclass(frozen=True)
class HttpResponse:
    """A whole answer. Statuses from 400 on are raised, never returned."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Sink = Callable[[bytes], None]


class HttpClient:
    """One pool of connections for all requests of a node, an async context manager in trio.

    Every method raises RefusedError with the server's code when it says no, and RelayError for whatever else a peer or
    the network can cause: no answer in time, a broken connection, an answer that is too long. Redirects are not
    followed.
    """

    def __init__(self, aio: AioThread, *, connections_per_host: int = 16, user_agent: str = "intellect-node") -> None:
        self._aio = aio
        self._connections_per_host = connections_per_host
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpClient:
        self._session = await self._aio.run(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            with trio.move_on_after(SHUTDOWN_S, shield=True):
                await self._aio.run(session.close)

    async def get(
        self,
        url: str,
        *,
        timeout_s: float = 20.0,
        max_bytes: int = MAX_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """GET a small answer whole. For a long poll give a `timeout_s` beyond the poll's own wait."""
        return await self._aio.run(self._exchange, "GET", url, None, timeout_s, max_bytes, headers)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        timeout_s: float = 20.0,
        max_bytes: int = MAX_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """POST a small body, msgpack unless `headers` say otherwise."""
        headers = {"Content-Type": MSGPACK, **(headers or {})}
        return await self._aio.run(self._exchange, "POST", url, body, timeout_s, max_bytes, headers)

    async def post_file(
        self,
        url: str,
        path: Path,
        *,
        timeout_s: float = 600.0,
        progress_timeout_s: float = 30.0,
        max_bytes: int = MAX_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """POST a file as it lies on disk. The peer must take each piece, and answer, within `progress_timeout_s`."""
        size = (await trio.to_thread.run_sync(path.stat)).st_size
        headers = {"Content-Type": OCTETS, "Content-Length": str(size), **(headers or {})}
        return await self._aio.run(self._upload, url, path, timeout_s, progress_timeout_s, max_bytes, headers)

    async def get_to_file(
        self,
        url: str,
        path: Path,
        *,
        expected_bytes: int,
        expected_sha256: bytes,
        timeout_s: float = 600.0,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """GET a file of known size and hash; `path` appears only when both hold. Raises ChecksumError too."""
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb", buffering=0) as file:
                digest = await self.get_stream(
                    url,
                    lambda piece: _write_all(file.fileno(), piece),
                    expected_bytes=expected_bytes,
                    timeout_s=timeout_s,
                    progress_timeout_s=progress_timeout_s,
                    headers=headers,
                )
                if digest != expected_sha256:
                    raise ChecksumError(f"{_host(url)} sent {expected_bytes} bytes with another hash than was signed")
                await trio.to_thread.run_sync(os.fsync, file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    async def get_stream(
        self,
        url: str,
        sink: Sink,
        *,
        expected_bytes: int,
        timeout_s: float = 600.0,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """GET exactly `expected_bytes`, hand them to `sink` in pieces, in order, in a worker thread; gives the SHA-256.

        Memory stays at two pieces of a MiB whatever the size. What `sink` raises comes out of here.
        """
        return await self._aio.run(
            self._download, url, sink, expected_bytes, timeout_s, progress_timeout_s, dict(headers or {})
        )

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=128, limit_per_host=self._connections_per_host, keepalive_timeout=15),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": self._user_agent, "Accept-Encoding": "identity"},
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
            trust_env=False,
        )

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise NodeError("the HTTP client is closed: a request was made outside of its `async with` block")
        return self._session

    async def _exchange(
        self,
        method: str,
        url: str,
        body: bytes | None,
        timeout_s: float,
        max_bytes: int,
        headers: Mapping[str, str] | None,
    ) -> HttpResponse:
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        with _errors_of(url, timeout_s):
            async with self._pool().request(
                method, url, data=body, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                return await _whole(response, max_bytes)

    async def _upload(
        self,
        url: str,
        path: Path,
        timeout_s: float,
        progress_timeout_s: float,
        max_bytes: int,
        headers: dict[str, str],
    ) -> HttpResponse:
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        with _errors_of(url, progress_timeout_s):
            async with asyncio.timeout(CONNECT_TIMEOUT_S + progress_timeout_s) as watchdog:
                body = _file_pieces(path, watchdog, progress_timeout_s)
                async with self._pool().post(
                    url, data=body, headers=headers, timeout=limits, allow_redirects=False
                ) as response:
                    return await _whole(response, max_bytes)

    async def _download(
        self,
        url: str,
        sink: Sink,
        expected_bytes: int,
        timeout_s: float,
        progress_timeout_s: float,
        headers: dict[str, str],
    ) -> bytes:
        limits = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s), sock_read=progress_timeout_s
        )
        with _errors_of(url, progress_timeout_s):
            async with self._pool().get(url, headers=headers, timeout=limits, allow_redirects=False) as response:
                await _require_success(response)
                _require_length(response, expected_bytes)
                return await _drain(response, sink, expected_bytes)


@contextmanager
def _errors_of(url: str, timeout_s: float) -> Iterator[None]:
    """Translate what aiohttp and the network raise; the one place where this happens."""
    try:
        yield
    except TimeoutError as error:
        raise RelayError(f"{_host(url)} did not answer, or went silent, for {timeout_s:g} s") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise RelayError(f"{_host(url)} cannot be reached, or broke off: {reason}") from error
    except ValueError as error:  # aiohttp's answer to a URL or a header that it cannot use
        raise RelayError(f"{url[:200]!r} cannot be requested: {str(error)[:200]}") from error


def _host(url: str) -> str:
    """The part of a URL that tells a person whom we talked to, without a query or a secret."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2][:100] or url[:100]
    except ValueError:
        return url[:100]


async def _whole(response: aiohttp.ClientResponse, max_bytes: int) -> HttpResponse:
    await _require_success(response)
    body = await _read_at_most(response, max_bytes)
    if body is None:
        raise RelayError(f"{_host(str(response.url))} answered with more than the {max_bytes} bytes that were expected")
    return HttpResponse(response.status, response.headers, body)


async def _read_at_most(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """The body, or None as soon as it is seen to be longer."""
    if (response.content_length or 0) > max_bytes:
        return None
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            return None
    return bytes(body)


class _ErrorBody(msgspec.Struct):
    code: str
    message: str = ""
    hint: str = ""


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    host = _host(str(response.url))
    if response.status < 400:
        raise RelayError(f"{host} answered with a redirect, which is not followed")
    body = await _read_at_most(response, MAX_ERROR_BYTES) or b""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        said = msgspec.msgpack.decode(body, type=_ErrorBody)
        raise RefusedError(
            f"{host} refused: {_printable(said.message)}", code=_printable(said.code)[:64], hint=_printable(said.hint)
        )
    raise RefusedError(f"{host} answered with status {response.status}", code=f"http-{response.status}")


def _printable(text: str) -> str:
    """Words that a peer had a part in, safe for a terminal, a log line and UTF-8."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:1000])


def _require_length(response: aiohttp.ClientResponse, expected_bytes: int) -> None:
    length = response.content_length
    if length is not None and length != expected_bytes:
        raise RelayError(f"{_host(str(response.url))} offers {length} bytes where {expected_bytes} were signed")


async def _drain(response: aiohttp.ClientResponse, sink: Sink, expected_bytes: int) -> bytes:
    """Feed the body to `sink` by the MiB in a thread (hashing and writing let go of the interpreter lock)."""
    digest = hashlib.sha256()
    received = 0
    piece = bytearray()
    async for chunk in response.content.iter_any():
        piece += chunk
        received += len(chunk)
        if received > expected_bytes:
            raise RelayError(f"{_host(str(response.url))} sent more than the {expected_bytes} bytes that were signed")
        if len(piece) >= PIECE_BYTES:
            await _in_thread(_consume, digest.update, sink, bytes(piece))
            piece.clear()
    if received != expected_bytes:
        raise RelayError(f"{_host(str(response.url))} sent {received} of {expected_bytes} bytes")
    await _in_thread(_consume, digest.update, sink, bytes(piece))
    return digest.digest()


async def _in_thread(function: Callable[..., None], *args: Any) -> None:
    """Call in a worker thread; even a cancelled caller goes on only when the call has ended, so nothing writes late."""
    call = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def _consume(update: Sink, sink: Sink, piece: bytes) -> None:
    update(piece)
    sink(piece)


async def _file_pieces(path: Path, watchdog: asyncio.Timeout, progress_timeout_s: float) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
            watchdog.reschedule(loop.time() + progress_timeout_s)
            yield piece
    watchdog.reschedule(loop.time() + progress_timeout_s)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
