"""A ledger in one file, as earlier versions kept it, becomes a directory of segments; no crash loses anything.

The directory is made whole beside the file and synced; then the file makes way, and the directory takes its name.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

from node.ledger.segments import SegmentWriter, read_segments
from protocol.atomic import sync_directory
from protocol.constants import LEDGER_SEGMENT_BYTES
from protocol.errors import DataDirError

log = logging.getLogger(__name__)

STAGED: Final = ".segments"
REPLACED: Final = ".single-file"


def settle_layout(path: Path, *, start: bytes, segment_bytes: int = LEDGER_SEGMENT_BYTES) -> None:
    """Have a directory at `path`, with the entries of the single file that is there, if one is.

    Raises DataDirError; the file is then as it was.
    """
    staged, replaced = _beside(path, STAGED), _beside(path, REPLACED)
    try:
        if replaced.exists() and not path.exists():
            staged.rename(path)
        elif path.is_file():
            _stage(path, staged, start=start, segment_bytes=segment_bytes)
            path.rename(replaced)
            staged.rename(path)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
        if replaced.exists():
            log.info("ledger path=%s: the single file of an earlier version is now a directory of segments", path)
            replaced.unlink()
    except OSError as error:
        raise DataDirError(
            f"the ledger {path} cannot be made a directory of segments: {error.strerror}",
            hint=f"check free space and permissions (df -h {path.parent}), then start the node again",
        ) from error


def _stage(path: Path, staged: Path, *, start: bytes, segment_bytes: int) -> None:
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    writer = SegmentWriter(staged, start=start, segment_bytes=segment_bytes)
    for segment in read_segments(path, segment_bytes=segment_bytes):
        left = list(segment.entries)
        while left:
            left = left[len(writer.append(left)) :]
    writer.close()
    sync_directory(staged)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
