"""The HTTP client: requests that trio code awaits, on p2p.bridge's asyncio thread.

aiohttp's errors are translated here and nowhere else. A request to a relay goes by its Contact (p2p.contacts): over TLS
to the one certificate that a signed record names, with a token that is got and renewed on the way, and not while the
relay has asked for quiet.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import trio

from p2p.bridge import AioThread
from p2p.contacts import MAX_PATIENCE_S, Contact
from p2p.http.answers import MAX_BODY_BYTES, MSGPACK, PROGRESS_TIMEOUT_S, printable
from p2p.http.files import OCTETS
from p2p.http.stream import Download as Stream
from p2p.http.stream import Refusal, Sink, SinkFailed, StreamPool, Wanted, WrongCertificate, WrongLength
from p2p.http.tally import RequestTally
from p2p.limits import DownloadBudget
from protocol.atomic import write_refused
from protocol.errors import ChecksumError, NodeError, RefusedError, RelayError

CHUNK_BYTES: Final = 1 << 18
CONNECT_TIMEOUT_S: Final = 10.0
HELLO_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 1.0
GOODBYE_S: Final = 0.05
MAX_ERROR_BYTES: Final = 8192
MAX_HELLO_BYTES: Final = 4096
MAX_QUIET_S: Final = 86_400
"""No relay can silence a client for longer than a day."""
MAX_STREAMS: Final = 64
"""Large downloads at once, each in a thread of its own."""
UNPACED_BYTES: Final = 1 << 16
"""Answers up to this size are counted in the budget and never held back: heads, feeds, receipts."""
MAX_PACE_S: Final = 60.0
MAX_RETRIES: Final = 2
"""Of one request that is refused because of its token, or for a moment."""

T = TypeVar("T")
Send = Callable[[dict[str, str]], Awaitable[T]]


@dataclass(frozen=True)
class HttpResponse:
    """A whole answer. Statuses from 400 on are raised, never returned."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """One pool of connections for all requests of a node, an async context manager in trio.

    Every method raises RefusedError with the server's code when it says no, and RelayError for whatever else a peer or
    the network can cause: no answer in time, a broken connection, an answer that is too long. Redirects are not
    followed. With a `contact` the request is made as that says.
    """

    def __init__(
        self,
        aio: AioThread,
        *,
        connections_per_host: int = 16,
        user_agent: str = "intellect-node",
        budget: DownloadBudget | None = None,
    ) -> None:
        """`budget` paces what is downloaded in pieces and counts everything that comes."""
        self._aio = aio
        self._budget = budget or DownloadBudget()
        self._connections_per_host = connections_per_host
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._spoke_tls = False
        self.tally = RequestTally()
        self._streams = StreamPool()
        self._stream_threads = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="download")

    @property
    def budget(self) -> DownloadBudget:
        """What may be downloaded, and what came today."""
        return self._budget

    async def __aenter__(self) -> HttpClient:
        self._session = await self._aio.run(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await self._aio.run(self._close, session)
        self._stream_threads.shutdown(wait=False, cancel_futures=True)
        self._streams.close()

    async def get(
        self,
        url: str,
        *,
        timeout_s: float = 20.0,
        progress_timeout_s: float | None = None,
        max_bytes: int = MAX_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
        contact: Contact | None = None,
    ) -> HttpResponse:
        """GET a small answer whole. For a long poll give a `timeout_s` beyond the poll's own wait.

        With a `progress_timeout_s` the peer must not go silent for so long.
        """
        question = _Question("GET", url, None, timeout_s, max_bytes, progress_timeout_s)
        return await self._aio.run(self._ask, question, dict(headers or {}), contact)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        timeout_s: float = 20.0,
        max_bytes: int = MAX_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
        contact: Contact | None = None,
    ) -> HttpResponse:
        """POST a small body, msgpack unless `headers` say otherwise."""
        headers = {"Content-Type": MSGPACK, **(headers or {})}
        question = _Question("POST", url, body, timeout_s, max_bytes)
        return await self._aio.run(self._ask, question, headers, contact)

    async def post_file(
        self,
        url: str,
        path: Path,
        *,
        timeout_s: float = 600.0,
        progress_timeout_s: float = 30.0,
        max_bytes: int = MAX_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
        contact: Contact | None = None,
    ) -> HttpResponse:
        """POST a file as it lies on disk. The peer must take each piece, and answer, within `progress_timeout_s`."""
        size = (await trio.to_thread.run_sync(path.stat)).st_size
        headers = {"Content-Type": OCTETS, "Content-Length": str(size), **(headers or {})}
        upload = _Upload(url, path, timeout_s, progress_timeout_s, max_bytes)
        return await self._aio.run(self._hand_in, upload, headers, contact)

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
        contact: Contact | None = None,
    ) -> None:
        """GET a file of known size and hash; `path` appears only when both hold.

        Raises ChecksumError too, and DataDirError where this computer's disk does not take it.
        """
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
                    contact=contact,
                )
                if digest != expected_sha256:
                    raise ChecksumError(f"{_host(url)} sent {expected_bytes} bytes with another hash than was signed")
                await trio.to_thread.run_sync(os.fsync, file.fileno())
            part.replace(path)
        except OSError as error:
            raise write_refused(path, error) from error
        finally:
            with suppress(OSError):  # a disk that has become read-only refuses this as well
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
        contact: Contact | None = None,
    ) -> bytes:
        """GET exactly `expected_bytes`, hand them to `sink` in pieces, in order, in a worker thread; gives the SHA-256.

        A piece is valid until `sink` returns. Memory stays at a MiB whatever the size. What `sink` raises comes out.
        """
        download = _Download(url, self._paced(sink), expected_bytes, timeout_s, progress_timeout_s)
        return await self._aio.run(self._fetch, download, dict(headers or {}), contact)

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=128, limit_per_host=self._connections_per_host, keepalive_timeout=15),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": self._user_agent, "Accept-Encoding": "identity"},
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
            trust_env=False,
        )

    async def _close(self, session: aiohttp.ClientSession) -> None:
        await session.close()
        if self._spoke_tls:
            await asyncio.sleep(GOODBYE_S)  # aiohttp does not wait for the ends of its TLS connections

    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise NodeError("the HTTP client is closed: a request was made outside of its `async with` block")
        return self._session

    # In the HTTP thread.

    async def _ask(self, question: _Question, headers: dict[str, str], contact: Contact | None) -> HttpResponse:
        return await self._as(contact, headers, lambda all_headers: self._exchange(question, all_headers, contact))

    async def _hand_in(self, upload: _Upload, headers: dict[str, str], contact: Contact | None) -> HttpResponse:
        return await self._as(contact, headers, lambda all_headers: self._upload(upload, all_headers, contact))

    async def _fetch(self, download: _Download, headers: dict[str, str], contact: Contact | None) -> bytes:
        send: Send[bytes] = lambda all_headers: self._download(download, all_headers, contact)  # noqa: E731
        return await self._as(contact, headers, send, bulk=True)

    async def _as(self, contact: Contact | None, headers: dict[str, str], send: Send[T], *, bulk: bool = False) -> T:
        """Send with the token of a contact; again with a new one where it has ended, or after a short wait."""
        if contact is None:
            return await send(headers)
        self._spoke_tls = True
        for attempts_left in reversed(range(MAX_RETRIES + 1)):
            await contact.quiet(bulk=bulk)
            token = ""
            try:
                token = await contact.authorization(self._post_hello(contact))
                return await send({**headers, "Authorization": token})
            except RefusedError as refused:
                if refused.retry_after_s:
                    contact.hush(refused.retry_after_s, bulk=bulk)
                if not attempts_left or not _worth_another(refused, contact, token):
                    raise
        raise NodeError("a request was neither answered nor refused")

    def _post_hello(self, contact: Contact) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def post(url: str, body: bytes) -> bytes:
            question = _Question("POST", url, body, HELLO_TIMEOUT_S, MAX_HELLO_BYTES)
            return (await self._exchange(question, {"Content-Type": MSGPACK}, contact)).body

        return post

    async def _exchange(self, ask: _Question, headers: dict[str, str], contact: Contact | None) -> HttpResponse:
        self.tally.add(ask.method, ask.url)
        limits = aiohttp.ClientTimeout(
            total=ask.timeout_s,
            sock_connect=min(CONNECT_TIMEOUT_S, ask.timeout_s),
            sock_read=ask.progress_timeout_s,
        )
        options = _options(headers, limits, contact)
        with _errors_of(ask.url, ask.progress_timeout_s or ask.timeout_s):
            async with self._pool().request(ask.method, ask.url, data=ask.body, **options) as response:
                answer = await _whole(response, ask.max_bytes)
        pause_s = self._budget.take(len(answer.body))
        if len(answer.body) > UNPACED_BYTES:
            await asyncio.sleep(min(pause_s, MAX_PACE_S))
        return answer

    def _paced(self, sink: Sink) -> Sink:
        """A sink that is as slow as the budget says; the sender is held back by the connection itself."""

        def write(piece: memoryview) -> None:
            sink(piece)
            if (pause_s := self._budget.take(len(piece))) > 0:
                time.sleep(min(pause_s, MAX_PACE_S))

        return write

    async def _upload(self, upload: _Upload, headers: dict[str, str], contact: Contact | None) -> HttpResponse:
        self.tally.add("POST", upload.url)
        progress_timeout_s = upload.progress_timeout_s
        limits = aiohttp.ClientTimeout(total=upload.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        options = _options(headers, limits, contact)
        with upload.path.open("rb") as file, _errors_of(upload.url, progress_timeout_s):
            async with asyncio.timeout(CONNECT_TIMEOUT_S + progress_timeout_s) as watchdog:
                body = _file_pieces(file, watchdog, progress_timeout_s)
                async with self._pool().post(upload.url, data=body, **options) as response:
                    return await _whole(response, upload.max_bytes)

    async def _download(self, download: _Download, headers: dict[str, str], contact: Contact | None) -> bytes:
        self.tally.add("GET", download.url)
        wanted = Wanted(
            download.url,
            {"User-Agent": self._user_agent, "Accept-Encoding": "identity", **headers},
            download.expected_bytes,
            connect_timeout_s=min(CONNECT_TIMEOUT_S, download.timeout_s),
            progress_timeout_s=download.progress_timeout_s,
            fingerprint=contact.fingerprint if contact is not None else b"",
        )
        with _errors_of(download.url, download.progress_timeout_s), _errors_of_stream(wanted):
            async with asyncio.timeout(download.timeout_s):
                return await _run_stream(Stream(self._streams, wanted), download.sink, self._stream_threads)


@dataclass(frozen=True)
class _Question:
    method: str
    url: str
    body: bytes | None
    timeout_s: float
    max_bytes: int
    progress_timeout_s: float | None = None


@dataclass(frozen=True)
class _Upload:
    url: str
    path: Path
    timeout_s: float
    progress_timeout_s: float
    max_bytes: int


@dataclass(frozen=True)
class _Download:
    url: str
    sink: Sink
    expected_bytes: int
    timeout_s: float
    progress_timeout_s: float


def _options(headers: dict[str, str], limits: aiohttp.ClientTimeout, contact: Contact | None) -> dict[str, Any]:
    tls = True if contact is None else contact.tls
    return {"headers": headers, "timeout": limits, "ssl": tls, "allow_redirects": False}


def _worth_another(refused: RefusedError, contact: Contact, token: str) -> bool:
    if refused.code == "unauthorized":
        return contact.renew(token)
    return 0 < refused.retry_after_s <= MAX_PATIENCE_S


@contextmanager
def _errors_of(url: str, timeout_s: float) -> Iterator[None]:
    """Translate what aiohttp and the network raise; the one place where this happens."""
    try:
        yield
    except TimeoutError as error:
        raise RelayError(f"{_host(url)} did not answer, or went silent, for {timeout_s:g} s") from error
    except aiohttp.ServerFingerprintMismatch as error:
        raise _wrong_certificate(_host(url), error.got, error.expected) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        reason = _said_of(error)
        raise RelayError(f"{_host(url)} cannot be reached, or broke off: {reason}") from error
    except ValueError as error:  # aiohttp's answer to a URL or a header that it cannot use
        raise RelayError(f"{url[:200]!r} cannot be requested: {str(error)[:200]}") from error


def _said_of(error: Exception) -> str:
    """aiohttp's words; where no connection came about the system's, for aiohttp prints its own objects."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else str(error.os_error.strerror or error.os_error)[:200]
    return str(error)[:200] or type(error).__name__


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
    evidence: bytes = b""


async def _require_success(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    body = b"" if response.status < 400 else await _read_at_most(response, MAX_ERROR_BYTES) or b""
    raise _refused(_host(str(response.url)), response.status, response.headers.get("Retry-After", ""), body)


def _refused(host: str, status: int, retry_after: str, body: bytes) -> RelayError:
    """What an answer that is no success says."""
    if status < 400:
        return RelayError(f"{host} answered with a redirect, which is not followed")
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        said = msgspec.msgpack.decode(body, type=_ErrorBody)
        return RefusedError(
            f"{host} refused: {printable(said.message)}",
            code=printable(said.code)[:64],
            hint=printable(said.hint),
            retry_after_s=_retry_after_s(status, retry_after),
            evidence=said.evidence,
        )
    return RefusedError(f"{host} answered with status {status}", code=f"http-{status}")


def _retry_after_s(status: int, text: str) -> float:
    """How long a 429 asks for quiet; 0 where it does not say."""
    known = status == 429 and text.isascii() and text.isdigit() and len(text) <= 9
    return float(min(int(text), MAX_QUIET_S)) if known else 0.0


def _wrong_certificate(host: str, got: bytes, expected: bytes) -> RelayError:
    return RelayError(
        f"{host} shows another TLS certificate ({got.hex()[:16]}…) than was signed for it ({expected.hex()[:16]}…):"
        " it has a new one that is not announced yet, or somebody sits in between"
    )


@contextmanager
def _errors_of_stream(wanted: Wanted) -> Iterator[None]:
    """Translate what p2p.http.stream raises beyond what the network does."""
    host = _host(wanted.url)
    try:
        yield
    except Refusal as refusal:
        raise _refused(host, refusal.status, refusal.retry_after, refusal.body) from refusal
    except WrongLength as error:
        verb = "offers" if error.offered else "sent"
        raise RelayError(f"{host} {verb} {error.received} bytes where {wanted.expected_bytes} were signed") from error
    except WrongCertificate as error:
        raise _wrong_certificate(host, error.got, error.expected) from error
    except SinkFailed as error:
        raise error.error from error
    except HTTPException as error:
        raise RelayError(f"{host} does not speak HTTP, or broke off: {type(error).__name__}") from error
    except TimeoutError:
        raise
    except OSError as error:  # no route, no such name, no TLS, or a connection that broke off
        raise RelayError(f"{host} cannot be reached: {str(error)[:200]}") from error


async def _run_stream(stream: Stream, sink: Sink, threads: ThreadPoolExecutor) -> bytes:
    """Run in a thread of its own; a cancelled caller goes on only when nothing can be written any more."""
    call = asyncio.get_running_loop().run_in_executor(threads, stream.run, sink)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        if stream.abort():
            await asyncio.wait([call])
        call.add_done_callback(_forget_failure)
        raise


def _forget_failure(call: asyncio.Future[bytes]) -> None:
    if not call.cancelled():
        call.exception()


async def _file_pieces(file: BinaryIO, watchdog: asyncio.Timeout, progress_timeout_s: float) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
        watchdog.reschedule(loop.time() + progress_timeout_s)
        yield piece
    watchdog.reschedule(loop.time() + progress_timeout_s)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
