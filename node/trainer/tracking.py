"""Curves in a tracking service, W&B or trackio, without ever being in the way.

Rows go through a bounded queue to a process of their own (node.trainer.track). A service that is slow, broken or not
installed costs rows, which are counted, and nothing else: the metrics file has them all.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio

from node.status import StatusBoard
from protocol.errors import NodeError

log = logging.getLogger(__name__)

QUEUE_ROWS: Final = 256

Call = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Calls a method of node.trainer.track.Service with its parameters. Raises NodeError."""


class Tracker:
    """Hands rows on for as long as `run` runs; drops them when they come faster than the service takes them."""

    def __init__(self, call: Call, board: StatusBoard, *, queue_rows: int = QUEUE_ROWS) -> None:
        self._call = call
        self._board = board
        self._into, self._out_of = trio.open_memory_channel[dict[str, Any]](queue_rows)
        self._idle = trio.Event()
        self._idle.set()
        self.dropped = 0

    def offer(self, row: Mapping[str, Any]) -> None:
        """Queue a row, or drop and count it. Returns at once."""
        try:
            self._into.send_nowait(dict(row))
            if self._idle.is_set():
                self._idle = trio.Event()
        except trio.WouldBlock:
            self._drop("the queue is full")

    async def run(self) -> None:
        """Hand on until cancelled."""
        while True:
            row = await self._out_of.receive()
            try:
                await self._call("log", {"row": row})
            except NodeError as error:
                self._drop(error.message)
            if not self._out_of.statistics().current_buffer_used:
                self._idle.set()

    async def finish(self) -> None:
        """Wait until every queued row was handed on or dropped, then let the service write what it holds."""
        await self._idle.wait()
        try:
            await self._call("finish", {})
        except NodeError as error:
            log.warning("tracking not finished error=%r", error.message)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        self._board.details(tracking_dropped=self.dropped)
        if self.dropped.bit_count() == 1:  # the first, and ever more rarely
            log.warning("tracking rows dropped=%d why=%r", self.dropped, why)
