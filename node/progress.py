"""How a download goes, on the board: bytes, rate, relays, time left. For people, so it is smoothed and never exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from node.status import StatusBoard
from protocol.identity import PeerId

_WINDOW_S: Final = 10.0
"""The rate is that of the last so many seconds."""


class DownloadProgress:
    """Called with bytes done, bytes in total and bytes by relay (p2p.shardcast.client's `on_progress`)."""

    def __init__(self, board: StatusBoard, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._total = 0
        self._seen: list[tuple[float, int]] = []

    def __call__(self, done: int, total: int, by_relay: Mapping[PeerId, int]) -> None:
        now = self._clock()
        if total != self._total or (self._seen and done < self._seen[-1][1]):
            self._total, self._seen = total, []
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
            del self._seen[0]
        (since, before), rate = self._seen[0], 0.0
        if now > since:
            rate = (done - before) / (now - since)
        self._board.details(
            download={
                "bytes": done,
                "total_bytes": total,
                "bytes_per_s": round(rate),
                "left_s": round((total - done) / rate) if rate else None,
                "by_relay": {str(peer): received for peer, received in by_relay.items()},
            }
        )
