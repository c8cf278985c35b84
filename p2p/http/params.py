"""What requests carry in paths and queries: numbers, seconds and ids, each with bounds. All raise MalformedError."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from protocol.errors import MalformedError

MAX_DIGITS: Final = 16
MAX_SECONDS: Final = 3600.0


def whole_number(text: str, what: str) -> int:
    """A whole number of at most 16 digits, without sign or separators."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise MalformedError(f"{what} must be a whole number, not {text[:40]!r}")
    return int(text)


def query_number(request: web.Request, name: str, *, default: int = 0, most: int | None = None) -> int:
    """A whole number of the query; `default` where it is missing or empty, and never more than `most`."""
    text = request.query.get(name, "")
    value = whole_number(text, name) if text else default
    return value if most is None else min(value, most)


def query_seconds(request: web.Request, name: str) -> float:
    """A number of seconds of the query, 0 where it is missing."""
    try:
        seconds = float(request.query.get(name, "0"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise MalformedError(f"{name} must be a number of seconds from 0 to {MAX_SECONDS:g}")
    return seconds


def digest(text: str, what: str) -> bytes:
    """32 bytes, as 64 hexadecimal digits."""
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32:
        raise MalformedError(f"a {what} is 64 hexadecimal digits, not {text[:70]!r}")
    return value
