"""What is wrong with a validator's own computer, whatever it judges: no room on its disk, a child that does not start.

Nothing of that is a verdict, however long it lasts. While it may last no case begins, so that no file is fetched and
nothing computed in vain, and a person reads what to mend. What a submission can bring about by itself is not in here.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Final

import trio

from node.compute.process import ChildDiskError, NoChildError
from node.status import StatusBoard
from protocol.errors import DataDirError, NodeError

OWN_FAULTS: Final = (DataDirError, ChildDiskError, NoChildError, OSError)
RETRY_S: Final = 30.0
"""After one of them no case begins for so long."""
ROOM_BYTES: Final = 8 << 20
"""So much must be free beside a submission's file: what the logs of two SQLite files may grow by."""


class NoRoomError(DataDirError):
    """Raised when there is no room for one large file; for smaller ones there may be."""


class OwnFaults:
    """When this computer failed last, and what a person should know of it."""

    def __init__(self) -> None:
        self._text = ""
        self._resumes = -math.inf

    def met(self, error: Exception) -> None:
        """One of OWN_FAULTS: nothing begins for RETRY_S."""
        message, hint = (error.message, error.hint) if isinstance(error, NodeError) else (repr(error), "")
        self._text = f"{message}; {hint}" if hint else message
        self._resumes = trio.current_time() + RETRY_S

    async def wait(self, board: StatusBoard) -> float:
        """Until the latest one may be over; for how many seconds that was."""
        began = trio.current_time()
        while (wait_s := self._resumes - trio.current_time()) > 0:
            board.waiting(f"this computer, before anything is judged: {self._text}")
            await trio.sleep(wait_s)
        return trio.current_time() - began


def require_room(directory: Path, size: int) -> None:
    """Raises DataDirError where a file of this size, or what is learnt from it, would find no room.

    NoRoomError where a usual one would: a contributor's largest file must not keep the others waiting.
    """
    free, needed = shutil.disk_usage(directory).free, size + ROOM_BYTES
    if free < needed:
        raise (NoRoomError if free >= 2 * ROOM_BYTES else DataDirError)(
            f"judging a submission takes {needed} bytes of room, and the disk of {directory} has {free}",
            hint=f"make room there (`df -h {directory}`), and the node goes on by itself",
        )
