"""Reading a node's log files: by level, by time, and following what is added (`intellect-node logs`).

Files are what node.logs.BoundedLog leaves: `<name>.log` and the older `<name>.log.1`. Lines hold texts from peers: they
are shown with control characters escaped.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from node.logs import LEVELS, printable
from protocol.errors import ConfigError, DataDirError

POLL_S: Final = 0.5
_SPAN: Final = re.compile(r"([0-9]{1,6})(s|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HEAD: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?Z (debug|info|warning|error|critical) ")
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class Filter:
    """Which lines to show. A line without time and level, such as a traceback's, goes with the line before it."""

    level: str = "info"
    since: str = ""
    """Time as log lines have it; empty: from the beginning."""

    @classmethod
    def parse(cls, *, level: str, since: str | None, now: Callable[[], float] = time.time) -> Filter:
        """Read what a person wrote. Raises ConfigError."""
        if level not in LEVELS:
            raise ConfigError(f"there is no level {level[:40]!r}", hint=f"--level {', '.join(LEVELS)}")
        return cls(level, _start(since, now()) if since else "")

    def takes(self, time_text: str, level: str) -> bool:
        least = LEVELS.index(self.level)
        return time_text >= self.since and (level == "critical" or LEVELS.index(level) >= least)


def _start(since: str, now_s: float) -> str:
    if match := _SPAN.fullmatch(since):
        moment = datetime.fromtimestamp(now_s - int(match[1]) * _SECONDS[match[2]], UTC)
    else:
        try:
            moment = datetime.fromisoformat(since)
        except ValueError as error:
            raise ConfigError(
                f"not a time: {since[:40]!r}", hint="write --since 90s, 30m, 12h, 7d, or 2026-01-31T12:00:00Z"
            ) from error
        moment = moment.astimezone(UTC)  # a time without a zone is this computer's
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


def read_log(data_dir: Path, of: str, wanted: Filter, *, newest: int = 0) -> list[str]:
    """The lines that are wanted, the last `newest` of them where that is not 0. Raises DataDirError, ConfigError."""
    path = _path(data_dir, of)
    older = path.with_name(path.name + ".1")
    if not path.exists() and not older.exists():
        raise DataDirError(f"there is no log {path}", hint=_known(data_dir))
    lines = (line for each in (older, path) if each.exists() for line in _lines(each))
    return list(deque(_wanted(lines, wanted), maxlen=newest or None))


def follow_log(data_dir: Path, of: str, wanted: Filter) -> Iterator[str]:
    """Lines as they are added from now on, through rotations, until the caller stops."""
    path = _path(data_dir, of)
    return _wanted(_added(path), wanted)


def _path(data_dir: Path, of: str) -> Path:
    if not _NAME.fullmatch(of):
        raise ConfigError(f"no name of a log: {of[:40]!r}", hint=_known(data_dir))
    return data_dir / f"{of}.log"


def _known(data_dir: Path) -> str:
    names = sorted(path.stem for path in data_dir.glob("*.log"))
    return f"those here: {', '.join(names)}" if names else "start a node in this directory, or give another --data-dir"


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            yield line.rstrip("\n")


def _wanted(lines: Iterator[str], wanted: Filter) -> Iterator[str]:
    taken = not wanted.since and wanted.level == "debug"
    for line in lines:
        if head := _HEAD.match(line):
            taken = wanted.takes(head[1], head[2])
        if taken:
            yield printable(line)


def _added(path: Path) -> Iterator[str]:
    file: BinaryIO | None = path.open("rb") if path.exists() else None
    if file is not None:
        file.seek(0, os.SEEK_END)
    rest = b""
    try:
        while True:
            complete = file is None or _was_replaced(file.fileno(), path)  # nobody writes to it any more
            data = file.read() if file is not None else b""
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
            if not data and complete and path.exists():
                file = _reopened(file, path)
            elif not data:
                time.sleep(POLL_S)
    finally:
        if file is not None:
            file.close()


def _reopened(file: BinaryIO | None, path: Path) -> BinaryIO:
    if file is not None:
        file.close()
    return path.open("rb")


def _was_replaced(descriptor: int, path: Path) -> bool:
    try:
        return not os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return True
