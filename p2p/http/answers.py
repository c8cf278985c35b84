"""What servers say: msgpack bodies, error bodies with a code, and request bodies that are read with limits.

Handlers are asyncio code: they build answers with `msgpack_response` and raise this program's errors, which the server
turns into an error body `{"code", "message", "hint"}`. Bodies that stream are checked where they are consumed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.errors import (
    ChecksumError,
    ClockError,
    DataDirError,
    LedgerError,
    MalformedError,
    NodeError,
    ProtocolError,
    RefusedError,
    SignatureError,
    StaleRecordError,
    VersionError,
    WrongAuthorError,
    WrongRunError,
)

log = logging.getLogger(__name__)

MSGPACK: Final = "application/msgpack"
PROGRESS_TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = MAX_ENVELOPE_BYTES + 4096

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
    "stale-challenge": 401,
    "not-allowed": 403,
    "not-yours": 403,
    "evicted": 403,
    "not-admitted": 403,
    "not-found": 404,
    "not-yet": 404,
    "no-patch": 404,
    "no-manifest": 404,
    "timeout": 408,
    "too-large": 413,
    "busy": 429,
    "too-many-requests": 429,
    "over-budget": 429,
    "node-quota": 507,
    "step-quota": 507,
    "disk-full": 507,
}
_CODE_OF_STATUS: Final[Mapping[int, str]] = {
    404: "not-found",
    405: "no-such-method",
    413: "too-large",
    416: "bad-range",
    417: "malformed",
}


def msgpack_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer with a msgpack body; `bytes` are sent as they are (an envelope is msgpack already)."""
    body = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return web.Response(body=body, status=status, content_type=MSGPACK, headers=headers)


def error_response(
    status: int,
    code: str,
    message: str,
    hint: str = "",
    *,
    headers: Mapping[str, str] | None = None,
    evidence: bytes = b"",
) -> web.Response:
    """An answer that says why not: `code` for programs, `message` and `hint` for people, and what proves it, if any."""
    said: dict[str, object] = {"code": code, "message": printable(message), "hint": printable(hint)}
    if evidence:
        said["evidence"] = evidence
    return msgpack_response(said, status=status, headers=headers)


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


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
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
            log.warning("answer=507 error=%r", str(error))
            return _disk_full()
        return _internal_error(request)
    except Exception:
        return _internal_error(request)


def _answer_to(error: NodeError) -> web.Response:
    if isinstance(error, RefusedError):
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if error.retry_after_s else None
        status = _STATUS_OF_CODE.get(error.code, 409)
        return error_response(status, error.code, error.message, error.hint, headers=headers, evidence=error.evidence)
    for kind, status, code in _PROTOCOL_CODES:
        if isinstance(error, kind):
            return error_response(status, code, error.message, error.hint)
    if isinstance(error, DataDirError):  # its words name paths of this computer: they are for the log alone
        log.warning("answer=507 error=%r next=%r", error.message[:500], error.hint)
        return _disk_full()
    log.warning("answer=500 error=%s message=%s", type(error).__name__, error.message[:500])
    return error_response(500, "internal", "this node could not do it; its log says why")


def _disk_full() -> web.Response:
    return error_response(507, "disk-full", "this node's disk does not take it; its log says why", "try another relay")


def _internal_error(request: web.Request) -> web.Response:
    log.exception("answer=500 request=%r", f"{request.method} {request.path}"[:200])
    return error_response(500, "internal", "this node failed at it; its log says why")


def printable(text: str) -> str:
    """Words that a peer had a part in, safe for a terminal, a log line and UTF-8."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:1000])
