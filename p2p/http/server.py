"""The HTTP server: aiohttp on p2p.bridge's thread, run in a trio nursery, closed to those who hold connections idle.

Connections are counted by address before TLS begins, and every stage has a deadline: handshake, headers, body (where it
is read), answer. So slow and silent peers cost the others nothing, and each costs this node a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import trio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2p.bridge import AioThread
from p2p.http.answers import MAX_BODY_BYTES, answer_errors
from p2p.http.files import TLS_PIECE_BYTES
from p2p.http.listen import listening_socket
from p2p.tls import Certificate
from protocol.errors import NodeError

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 30.0
"""A connection that sends no further request for this long is closed."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
FIRST_REQUEST_TIMEOUT_S: Final = 10.0
"""From the connection, TLS greetings done, to the end of its first request's headers."""
ANSWER_TIMEOUT_S: Final = 30.0
MIN_ANSWER_BYTES_PER_S: Final = 16 << 10
"""Slower readers of an answer are cut off; files have a deadline for each piece (p2p.http.files)."""
SHUTDOWN_S: Final = 1.0
ACCEPT_PAUSE_S: Final = 1.0
MAX_CONNECTIONS: Final = 768
MAX_CONNECTIONS_PER_HOST: Final = 512

OnAnswer = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


class BoundAddress(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class HttpServer:
    """Serves `routes` on one address. `run` is started in a nursery; cancelling it closes the server within seconds.

    Give port 0 for any free port; with a `certificate` it speaks TLS and nothing else. `middlewares` are aiohttp's
    (`@web.middleware`); they see a request before its handler does, and may raise this program's errors as handlers
    may. `on_answer` is called when an answer's length is known and before its first byte.
    """

    def __init__(
        self,
        aio: AioThread,
        routes: Iterable[web.AbstractRouteDef],
        *,
        host: str,
        port: int,
        certificate: Certificate | None = None,
        middlewares: Iterable[Middleware] = (),
        on_answer: OnAnswer | None = None,
        max_connections: int = MAX_CONNECTIONS,
        max_connections_per_host: int = MAX_CONNECTIONS_PER_HOST,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        first_request_timeout_s: float = FIRST_REQUEST_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._aio = aio
        self._routes = list(routes)
        self._talk = _Talk(first_request_timeout_s)
        self._middlewares = [self._talk.middleware, _send_within(answer_timeout_s), answer_errors, *middlewares]
        self._host, self._port = host, port
        self._certificate = certificate
        self._on_answer = on_answer
        self._limits = _Limits(max_connections, min(max_connections, max_connections_per_host), handshake_timeout_s)
        self._idle_timeout_s = idle_timeout_s

    async def run(self, *, task_status: trio.TaskStatus[BoundAddress] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; the task status gives the bound address. Raises PortError."""
        sock = await trio.to_thread.run_sync(listening_socket, self._host, self._port)
        host, port = sock.getsockname()[:2]
        address = BoundAddress(host, port, "http" if self._certificate is None else "https")
        try:
            with trio.CancelScope(shield=True):  # quick; a cancelled start would leave a server behind
                acceptor, runner = await self._aio.run(self._start, sock)
        except BaseException:
            sock.close()
            raise
        try:
            task_status.started(address)
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(SHUTDOWN_S + 5, shield=True):
                await self._aio.run(_stop, acceptor, runner)

    async def _start(self, sock: socket.socket) -> tuple[_Acceptor, web.AppRunner]:
        app = web.Application(middlewares=self._middlewares, client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._routes)
        if self._on_answer is not None:
            app.on_response_prepare.append(self._on_answer)
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
        tls = None if self._certificate is None else self._certificate.server_context()
        return _Acceptor(server, sock, tls, self._limits, self._talk), runner


async def _stop(acceptor: _Acceptor, runner: web.AppRunner) -> None:
    await acceptor.close()
    transports = acceptor.transports()
    await runner.cleanup()
    for transport in transports:
        transport.abort()  # under TLS it still waits for the client's goodbye, which nobody needs any more
    await asyncio.sleep(0)


class _Limits(NamedTuple):
    connections: int
    per_host: int
    handshake_timeout_s: float


class _Talk:
    """Which connections have never asked anything, and which have a request under way."""

    def __init__(self, first_request_timeout_s: float) -> None:
        self._timeout_s = first_request_timeout_s
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle | None] = {}
        self._busy: set[asyncio.BaseProtocol] = set()

    def expect(self, protocol: web.RequestHandler) -> None:
        """A connection arrives; its first request may come with the last message of the handshake."""
        self._silent[protocol] = None

    def greeted(self, protocol: web.RequestHandler) -> None:
        """It is there, and has so long for its first request, unless that has come."""
        if protocol in self._silent:
            self._silent[protocol] = asyncio.get_running_loop().call_later(self._timeout_s, self.drop, protocol)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol = request.protocol
        if timer := self._silent.pop(protocol, None):
            timer.cancel()
        self._busy.add(protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(protocol)

    def drop(self, protocol: web.RequestHandler) -> None:
        """Cut a connection off."""
        if timer := self._silent.pop(protocol, None):
            timer.cancel()
        if protocol.transport is not None:
            protocol.transport.abort()

    def is_silent(self, protocol: web.RequestHandler) -> bool:
        return protocol in self._silent

    def is_busy(self, protocol: web.RequestHandler) -> bool:
        return protocol in self._busy


class _Acceptor:
    """Takes connections, counts them by address before anything is read, and hands them to aiohttp."""

    def __init__(
        self, server: web.Server, sock: socket.socket, tls: ssl.SSLContext | None, limits: _Limits, talk: _Talk
    ) -> None:
        self._server = server
        self._sock = sock
        self._tls = tls
        self._limits = limits
        self._talk = talk
        self._arriving: dict[asyncio.Task[None], tuple[str, web.RequestHandler]] = {}
        self._accepting = asyncio.get_running_loop().create_task(self._accept_loop())

    def transports(self) -> list[asyncio.Transport]:
        return [each.transport for each in self._server.connections if each.transport is not None]

    async def close(self) -> None:
        tasks = [self._accepting, *self._arriving]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=SHUTDOWN_S)
        self._sock.close()

    async def _accept_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._sock)
            except OSError as error:  # no file descriptor or memory is left: those who are here go on
                log.warning("accept error=%r pause_s=%.0f", str(error), ACCEPT_PAUSE_S)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            host = str(address[0])
            if self._has_room(host):
                protocol = self._server()
                self._talk.expect(protocol)
                task = loop.create_task(self._welcome(connection, protocol))
                self._arriving[task] = host, protocol
                task.add_done_callback(partial(self._arrived, protocol=protocol))
            else:
                connection.close()
            await asyncio.sleep(0)  # an accept that need not wait does not let others run

    def _arrived(self, task: asyncio.Task[None], *, protocol: web.RequestHandler) -> None:
        self._arriving.pop(task, None)
        if protocol.transport is None:  # it is gone, or never came
            self._talk.drop(protocol)

    async def _welcome(self, connection: socket.socket, protocol: web.RequestHandler) -> None:
        loop = asyncio.get_running_loop()
        deadlines: dict[str, float] = {}
        if self._tls is not None:
            deadlines = {"ssl_handshake_timeout": self._limits.handshake_timeout_s, "ssl_shutdown_timeout": SHUTDOWN_S}
        with suppress(OSError, TimeoutError):  # whoever cannot greet is gone; ssl's errors are OSErrors
            await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls, **deadlines)
            self._talk.greeted(protocol)

    def _has_room(self, host: str) -> bool:
        """Whether one more may come. Where all is taken, the oldest silent one makes way: silence keeps nobody out.

        Silent is who has not finished the TLS handshake or never asked anything; at its own address's limit, also who
        has no request under way.
        """
        connections = self._server.connections
        arriving = {task: where for task, (where, protocol) in self._arriving.items() if protocol.transport is None}
        total = len(connections) + len(arriving)
        if total < self._limits.per_host:
            return True
        its_arriving = [task for task, where in arriving.items() if where == host]
        its = [each for each in connections if _peer_host(each.transport) == host]
        if len(its) + len(its_arriving) >= self._limits.per_host:
            return self._drop_silent(its) or self._drop_arriving(its_arriving) or self._drop_idle(its)
        return total < self._limits.connections or self._drop_silent(connections) or self._drop_arriving(arriving)

    def _drop_arriving(self, tasks: Iterable[asyncio.Task[None]]) -> bool:
        for task in tasks:
            del self._arriving[task]
            task.cancel()
            return True
        return False

    def _drop_silent(self, connections: Iterable[web.RequestHandler]) -> bool:
        return self._drop_first(each for each in connections if self._talk.is_silent(each))

    def _drop_idle(self, connections: Iterable[web.RequestHandler]) -> bool:
        return self._drop_first(each for each in connections if not self._talk.is_busy(each))

    def _drop_first(self, connections: Iterable[web.RequestHandler]) -> bool:
        for protocol in connections:
            self._talk.drop(protocol)
            return True
        return False


def _peer_host(transport: asyncio.BaseTransport | None) -> str:
    name = transport.get_extra_info("peername") if transport is not None else None
    return str(name[0]) if name else ""


def _send_within(timeout_s: float) -> Middleware:
    """Cut off a client that does not take its answer (aiohttp would wait for ever), and let one go that is gone."""

    @web.middleware
    async def send_within(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
            if response.prepared:
                return response
            async with asyncio.timeout(timeout_s + (response.content_length or 0) / MIN_ANSWER_BYTES_PER_S):
                return await _send(request, response)
        except (TimeoutError, ConnectionError) as error:
            log.debug("connection from=%s cut off: %s", request.remote, error or "it did not take its answer")
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # nobody gets it; an error here would be a traceback in the log for each such peer

    return send_within


async def _send(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    body = response.body if isinstance(response, web.Response) else None
    if request.method == "HEAD" or not isinstance(body, bytes) or len(body) <= TLS_PIECE_BYTES:
        await response.prepare(request)
        await response.write_eof()
        return response
    # asyncio's TLS takes any single write, however large, for written at once: only pieces make it wait for the client
    pieces = web.StreamResponse(status=response.status, headers=response.headers)
    pieces.content_length = len(body)
    await pieces.prepare(request)
    for at in range(0, len(body), TLS_PIECE_BYTES):
        await pieces.write(body[at : at + TLS_PIECE_BYTES])
    await pieces.write_eof()
    return pieces
