"""Layouts of a data directory: what lies where, by number, and the steps from one to the next.

A step must end in the same state when it is done again: a crash may come between a step and the note that it was done.
Steps do not go back, so a directory of a newer layout is refused, with the name of the release that wrote it.

    1    the first
    2    the file `layout` is JSON and names the release that wrote last; the ledger is a directory of segments, which
         node.ledger.migrate makes of the single file when it is opened, since only a run's ledger can be read
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from node.version import SOFTWARE
from protocol.atomic import write_atomically
from protocol.errors import DataDirError

log = logging.getLogger(__name__)

LAYOUT_VERSION: Final = 2
LAYOUT_FILE: Final = "layout"
MAX_BYTES: Final = 1024
MAX_SOFTWARE_CHARS: Final = 64

Step = Callable[[Path], None]


class Layout(msgspec.Struct, frozen=True):
    """What the file says."""

    layout: int
    software: str = ""


def bring_up_to_date(directory: Path) -> None:
    """Do every step that leads from a directory's layout to this release's. The caller holds its lock.

    Raises DataDirError where no step leads, and where the disk fails; what was done until then stays done.
    """
    found = read_layout(directory)
    if found is None:
        _write(directory, LAYOUT_VERSION)
        return
    if found.layout > LAYOUT_VERSION:
        raise _too_new(directory, found)
    for number in range(found.layout, LAYOUT_VERSION):
        _do_step(directory, number)
    if found.layout == LAYOUT_VERSION and found.software != SOFTWARE:
        _write(directory, LAYOUT_VERSION)


def read_layout(directory: Path) -> Layout | None:
    """Which layout a directory has; None where no node has used it. Raises DataDirError for a damaged file."""
    path = directory / LAYOUT_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataDirError(
            f"{path} cannot be read: {error.strerror or error}", hint=f"look at its owner: ls -l {path}"
        ) from error
    try:
        found = msgspec.json.decode(data, type=Layout | int)  # the first layout's file held a number alone
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, data) from error
    layout = found if isinstance(found, Layout) else Layout(found)
    if layout.layout < 1:
        raise _damaged(path, data)
    return layout


def _do_step(directory: Path, number: int) -> None:
    step = STEPS.get(number)
    if step is None:
        raise DataDirError(
            f"{directory} has layout {number}, from which this release, {SOFTWARE}, knows no step to {number + 1}",
            hint="start it once with an older release that does, or give a new --data-dir",
        )
    try:
        step(directory)
    except OSError as error:
        raise DataDirError(
            f"{directory} could not be brought from layout {number} to {number + 1}: {error.strerror or error}",
            hint=f"check free space and permissions (df -h {directory}), then start again: the step is done anew",
        ) from error
    _write(directory, number + 1)
    log.info("data directory=%s layout=%d was=%d", directory, number + 1, number)


def _write(directory: Path, number: int) -> None:
    write_atomically(directory / LAYOUT_FILE, msgspec.json.encode(Layout(number, SOFTWARE)) + b"\n")


def _name_the_writer(directory: Path) -> None:
    """From 1 to 2 only the file itself changes, and it is written after every step."""


STEPS: Final[Mapping[int, Step]] = {1: _name_the_writer}
"""By the layout that a step begins with."""


def _too_new(directory: Path, found: Layout) -> DataDirError:
    writer = found.software[:MAX_SOFTWARE_CHARS] or "a newer release"
    release = writer.rpartition("/")[2]
    return DataDirError(
        f"{directory} was written by {writer}: layout {found.layout}; this release, {SOFTWARE}, knows those up to "
        f"{LAYOUT_VERSION}",
        hint=f"install that release: pip install 'intellect-node>={release}'; or give a new --data-dir"
        if found.software
        else "install the release that wrote it, or give a new --data-dir",
    )


def _damaged(path: Path, data: bytes) -> DataDirError:
    return DataDirError(
        f"{path} does not say which layout the directory has: {data[:40]!r}",
        hint=f"restore it from a back-up; if only this file is damaged: echo {LAYOUT_VERSION} > {path}",
    )
