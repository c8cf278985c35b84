"""How a node logs: one line to stderr, key=value, short peer ids, cut at 2 KiB; and log files that stay small.

What a library logs in a flood is held back: libp2p speaks from `error` up, from `info` up at level `debug`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from protocol.errors import DataDirError, innermost

_log = logging.getLogger(__name__)

MAX_LINE_CHARS: Final = 2048
LEVELS: Final = ("debug", "info", "warning", "error")
_LIBRARIES: Final = ("libp2p", "multiaddr", "aiohttp", "asyncio", "async_service", "zeroconf", "urllib3")
_FRAMES: Final = 12
_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{36}([1-9A-HJ-NP-Za-km-z]{8})")


class LineFormatter(logging.Formatter):
    """`2025-01-31T12:00:00.123Z info node.relay.door message key=value`, whatever the message holds.

    Peer ids are cut to what people compare, unless the record says `extra={"whole_peer_ids": True}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f" error={record.exc_info[1]!r} at={places(record.exc_info[1])}"
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                message += f" traceback={self.formatException(record.exc_info)}"
        if not getattr(record, "whole_peer_ids", False):
            message = shorten_peer_ids(message)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.name} {message}"
        return _one_line(line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for programs that collect logs: time, level, logger, message, and the error if any.

    At most MAX_LINE_CHARS long as well: what is cut says so.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not getattr(record, "whole_peer_ids", False):
            message = shorten_peer_ids(message)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = repr(record.exc_info[1])
            line["at"] = places(record.exc_info[1])
        return _bounded_json(line)


def _bounded_json(line: dict[str, str]) -> str:
    """A line's object; its longest text is halved until it fits, for escapes make texts longer."""
    while len(text := json.dumps(line)) > MAX_LINE_CHARS:
        longest = max(line, key=lambda name: len(line[name]))
        line[longest] = line[longest][: min(MAX_LINE_CHARS, len(line[longest])) // 2] + "…"
    return text


FORMATS: Final[Mapping[str, type[logging.Formatter]]] = {"text": LineFormatter, "json": JsonFormatter}


def places(error: BaseException) -> str:
    """Where an error was raised, for whoever reports it: `store.py:120(append) < mirror.py:61(_keep_up) < …`.

    Of a group, where its first error was. The innermost frames come first.
    """
    frames = traceback.extract_tb(innermost(error).__traceback__)
    return " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}({frame.name})" for frame in frames[: -_FRAMES - 1 : -1]
    )


def shorten_peer_ids(text: str) -> str:
    """Every peer id in a text, cut to the last eight characters that people compare."""
    return _PEER_ID.sub(r"\1", text)


class Stream(Protocol):
    """Where lines go: what logging asks of a stream."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def set_up_logging(
    level: str, *, stream: Stream | None = None, shown_level: str | None = None, log_format: str = "text"
) -> None:
    """Log to stderr from `level` up, as `text` or `json`; called once, by the program's entry point.

    `shown_level` keeps less important lines from that stream, though a log file gets them (`keep_log`).
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setLevel((shown_level or level).upper())
    handler.setFormatter(FORMATS[log_format]())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for library in _LIBRARIES:
        logging.getLogger(library).setLevel(logging.INFO if level == "debug" else logging.ERROR)


def keep_log(path: Path) -> FileHandler:
    """Log to a file as well, until the caller closes what this gives. Raises DataDirError."""
    try:
        handler = FileHandler(BoundedLog(path))
    except OSError as error:
        raise DataDirError(
            f"the log {path} cannot be written: {error.strerror}", hint=f"look at its owner: ls -l {path}"
        ) from error
    logging.getLogger().addHandler(handler)
    return handler


class FileHandler(logging.Handler):
    """Writes lines to a bounded log; leaves logging when it is closed."""

    def __init__(self, file: BoundedLog) -> None:
        super().__init__()
        self._bounded = file
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._bounded.write(f"{self.format(record)}\n".encode())
        except Exception:  # logging's own way with a record that cannot be shown
            self.handleError(record)

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        self._bounded.close()
        super().close()


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
            self._failed = False
        except OSError as error:
            told, self._failed = self._failed, True
            if not told:  # the warning comes here, too
                _log.warning("log file cannot be written path=%s error=%s", self.path, error)

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        """The full file stays open until there is a new one, so that a failure on the way loses text and no more."""
        with suppress(FileNotFoundError):  # somebody deleted it, or it has its new name and the open below failed
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        full, self._file = self._file, self.path.open("ab", buffering=0)
        full.close()
