"""How a node logs: one line to stderr, key=value, short peer ids, cut at 2 KiB; and log files that stay small.

What a library logs in a flood is held back: libp2p speaks from `error` up, from `info` up at level `debug`.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path
from typing import Final, TextIO

_log = logging.getLogger(__name__)

MAX_LINE_CHARS: Final = 2048
LEVELS: Final = ("debug", "info", "warning", "error")
_LIBRARIES: Final = ("libp2p", "multiaddr", "aiohttp", "asyncio", "async_service", "zeroconf", "urllib3")
_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{36}([1-9A-HJ-NP-Za-km-z]{8})")


class LineFormatter(logging.Formatter):
    """`2025-01-31T12:00:00.123Z info node.relay.door message key=value`, whatever the message holds.

    Peer ids are cut to what people compare, unless the record says `extra={"whole_peer_ids": True}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f" error={record.exc_info[1]!r}"
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                message += f" traceback={self.formatException(record.exc_info)}"
        if not getattr(record, "whole_peer_ids", False):
            message = shorten_peer_ids(message)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.name} {message}"
        return _one_line(line)


def shorten_peer_ids(text: str) -> str:
    """Every peer id in a text, cut to the last eight characters that people compare."""
    return _PEER_ID.sub(r"\1", text)


def set_up_logging(level: str, *, stream: TextIO | None = None) -> None:
    """Log to stderr from `level` up; called once, by the program's entry point."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for library in _LIBRARIES:
        logging.getLogger(library).setLevel(logging.INFO if level == "debug" else logging.ERROR)


def printable(text: str) -> str:
    """A text with every control character escaped, so that it stays on its line and cannot drive a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _one_line(text: str) -> str:
    escaped = printable(text[: MAX_LINE_CHARS + 1])
    return escaped if len(escaped) <= MAX_LINE_CHARS else escaped[: MAX_LINE_CHARS - 1] + "…"


class BoundedLog:
    """A log file of raw bytes, at most `max_bytes` long; what came before lies beside it as `<name>.1`, as long."""

    def __init__(self, path: Path, *, max_bytes: int = 4 << 20) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._max_bytes = max_bytes
        self._failed = False
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append. A full disk loses the text, not the node."""
        try:
            if self._file.tell() + len(data) > self._max_bytes:
                self._rotate()
            self._file.write(data[-self._max_bytes :])
        except OSError as error:
            if not self._failed:
                _log.warning("log file cannot be written path=%s error=%s", self.path, error)
            self._failed = True

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("ab", buffering=0)
