"""When each checkpoint came to which node, from the nodes' logs: only they say it to the millisecond.

A line that was not written, or has another form, is a checkpoint that was not seen there; nothing is concluded from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

MAX_LOG_BYTES: Final = 256 << 20
_LINE: Final = re.compile(
    r"^(?P<at>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) info (?P<module>[\w.]+) "
    r"(?:(?P<verb>published|pulled) step=(?P<moved>\d{1,9})|checkpoint step=(?P<held>\d{1,9}) .*held$)"
)


class CheckpointSeen(Struct):
    """One checkpoint on its way; wall-clock milliseconds."""

    step: int
    published_ms: int
    at_relays: dict[str, int] = {}
    """When each relay had all of it, by name."""
    held: dict[str, int] = {}
    """When each node that computes with it had all of it."""


def read_checkpoints(logs: Mapping[str, tuple[str, Path]]) -> list[CheckpointSeen]:
    """Every checkpoint that the trainer published, by step; `logs` are each node's role and log by its name."""
    found: dict[int, CheckpointSeen] = {}
    for role, path in logs.values():
        if role == "trainer":
            for at_ms, step in _events(path, "published"):
                found.setdefault(step, CheckpointSeen(step, at_ms))
    for name, (role, path) in logs.items():
        for at_ms, step in _events(path, "pulled" if role == "relay" else "held") if role != "trainer" else ():
            if step in found:
                place = found[step].at_relays if role == "relay" else found[step].held
                place.setdefault(name, at_ms)
    return [found[step] for step in sorted(found)]


def _events(path: Path, what: str) -> Iterator[tuple[int, int]]:
    """Times and steps of one kind of line."""
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            for line in _bounded(file):
                match = _LINE.match(line)
                if match and (match["verb"] or "held") == what:
                    yield _milliseconds(match["at"]), int(match["moved"] or match["held"])
    except OSError:  # a node that never started has none
        return


def _bounded(file: Iterator[str]) -> Iterator[str]:
    read = 0
    for line in file:
        read += len(line)
        if read > MAX_LOG_BYTES:
            return
        yield line.rstrip("\n")


def _milliseconds(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
