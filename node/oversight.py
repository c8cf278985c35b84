"""What goes on beside every role: its health is watched, events are told, traffic is counted, metrics are served."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import trio

from node.config import NodeConfig
from node.downloads import DownloadMeter
from node.health import HealthWatch
from node.monitoring import serve_monitoring
from node.status import StatusBoard
from node.webhooks import Webhooks
from p2p.bridge import AioThread
from p2p.http import HttpClient

SHOW_S: Final = 2.0


def download_meter(config: NodeConfig, board: StatusBoard, data_dir: Path) -> DownloadMeter:
    """The download budget that the settings name, as far as today has not spent it."""
    return DownloadMeter(
        data_dir / "downloads.json",
        board,
        bytes_per_s=config.download_bytes_per_s,
        bytes_per_day=config.download_bytes_per_day,
    )


class Oversight:
    """`run` it beside the role and `finish` it when the role has ended, however it did."""

    def __init__(
        self, config: NodeConfig, board: StatusBoard, http: HttpClient, *, data_dir: Path, meter: DownloadMeter
    ) -> None:
        self.health = HealthWatch(board, config.stall_after_s)
        self._listen = config.metrics_listen
        self._board = board
        self._http = http
        self._data_dir = data_dir
        self._meter = meter
        self._webhooks = Webhooks(config.webhooks, http, board, secret=config.webhook_secret.text)
        self.health.on_look.append(self._webhooks.look)

    async def run(self, aio: AioThread, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; started when metrics can be had. Raises PortError."""
        async with trio.open_nursery() as nursery:
            for task in (self.health.run, self._webhooks.run, self._meter.run, self._show_requests):
                nursery.start_soon(task)
            if self._listen:
                await nursery.start(self._serve, aio)
            task_status.started()

    async def _show_requests(self) -> None:
        while True:
            self._board.details(requests=self._http.tally.counts)
            await trio.sleep(SHOW_S)

    async def _serve(self, aio: AioThread, *, task_status: trio.TaskStatus[str]) -> None:
        await serve_monitoring(
            self._board,
            aio,
            listen=self._listen,
            data_dir=self._data_dir,
            watch=self.health,
            task_status=task_status,
        )

    async def finish(self) -> None:
        """Say how it ended, and keep the day's count."""
        self.health.look()
        with trio.CancelScope(shield=True):
            await self._webhooks.finish()
        self._meter.save()
