"""What this node downloads: paced by the settings, counted by the day, remembered across restarts, shown on the board.

`download_bytes_per_s` holds for everything that comes in pieces; `download_bytes_per_day` for what is begun: a
checkpoint under way is finished, the next one waits for midnight UTC. Heads, feeds and receipts always go on.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec
import trio

from node.status import StatusBoard
from p2p.limits import DownloadBudget
from protocol.atomic import write_atomically
from protocol.errors import DataDirError

log = logging.getLogger(__name__)

SHOW_S: Final = 2.0
SAVE_S: Final = 60.0
MAX_FILE_BYTES: Final = 256


class _Spent(msgspec.Struct, array_like=True):
    day: int
    spent: int


class DownloadMeter:
    """Owns the budget of one node. `run` it; `save` once more at the end."""

    def __init__(self, path: Path, board: StatusBoard, *, bytes_per_s: int = 0, bytes_per_day: int = 0) -> None:
        self.budget = DownloadBudget(bytes_per_s=bytes_per_s, bytes_per_day=bytes_per_day)
        self._path = path
        self._board = board
        self._saved: tuple[int, int] | None = None
        self._restore()

    async def run(self) -> None:
        """Show and save until cancelled."""
        saved_at = trio.current_time()
        while True:
            self.show()
            await trio.sleep(SHOW_S)
            if trio.current_time() - saved_at >= SAVE_S:
                saved_at = trio.current_time()
                await trio.to_thread.run_sync(self.save)

    def show(self) -> None:
        self._board.details(downloaded_today=self.budget.spent[1], download_per_day=self.budget.bytes_per_day)

    def save(self) -> None:
        """Keep the day's count; a disk that refuses costs the count, not the node."""
        spent = self.budget.spent
        if spent == self._saved:
            return
        try:
            write_atomically(self._path, msgspec.json.encode(_Spent(*spent)), sync=False)
            self._saved = spent
        except DataDirError as error:
            log.warning("downloads not counted path=%s error=%r", self._path, error.message)

    def _restore(self) -> None:
        try:
            with self._path.open("rb") as file:
                spent = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_Spent)
        except (OSError, msgspec.MsgspecError):
            return
        self.budget.restore(spent.day, max(0, spent.spent))
