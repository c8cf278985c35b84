"""What monitoring asks of a node: metrics for Prometheus, and whether it is well.

    GET /metrics         every metric of node.metrics for this role
    GET /health          200 while the node is live and ready, else 503; JSON with the reasons
    GET /health/live     200 while the event loop turns: else restart the process
    GET /health/ready    200 while the node can do its part

The status server on loopback has these; with the setting `metrics_listen` a server of its own has them, and nothing
else, for a Prometheus or a kubelet on another machine. What they say is counts and the node's public name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from aiohttp import web
from aiohttp.typedefs import Handler

from node.dashboard.guard import reading_only, refusal
from node.exposition import CONTENT_TYPE
from node.health import Health, HealthWatch, process_facts
from node.metrics import status_metrics
from node.status import StatusBoard
from p2p.bridge import AioThread
from p2p.http import HttpServer
from protocol.errors import ConfigError, PortError

MAX_CONNECTIONS: Final = 32
MAX_CONNECTIONS_PER_HOST: Final = 8
"""Well below all of them: one machine that holds connections keeps no other out."""
FIRST_REQUEST_TIMEOUT_S: Final = 5.0
UNSHOWN: Final = ("verdicts",)
"""Details that no metric is made from, and that are long."""


def monitoring_routes(board: StatusBoard, data_dir: Path, watch: HealthWatch | None) -> list[web.AbstractRouteDef]:
    """The routes of one node; without a watch it is as well as the board can tell."""

    def health() -> Health:
        return watch.judge() if watch is not None else Health(live=True, ready=True)

    async def metrics(request: web.Request) -> web.Response:
        said: dict[str, Any] = board.snapshot(without=UNSHOWN)
        said |= {"process": process_facts(data_dir), "health": health().plain()}
        return web.Response(body=status_metrics(said).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def whole(request: web.Request) -> web.Response:
        found = health()
        return _answer(found, ok=found.well)

    async def live(request: web.Request) -> web.Response:
        found = health()
        return _answer(found, ok=found.live)

    async def ready(request: web.Request) -> web.Response:
        found = health()
        return _answer(found, ok=found.ready)

    return [
        web.get("/metrics", metrics),
        web.get("/health", whole),
        web.get("/health/live", live),
        web.get("/health/ready", ready),
    ]


def _answer(found: Health, *, ok: bool) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(found.plain()), status=200 if ok else 503, content_type="application/json"
    )


async def serve_monitoring(
    board: StatusBoard,
    aio: AioThread,
    *,
    listen: str,
    data_dir: Path,
    watch: HealthWatch,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the routes at `listen`, `<host>:<port>`, until cancelled; the task status gives the URL.

    Raises PortError.
    """
    host, port = parse_listen(listen)
    server = HttpServer(
        aio,
        monitoring_routes(board, data_dir, watch),
        host=host,
        port=port,
        middlewares=[_read_only],
        max_connections=MAX_CONNECTIONS,
        max_connections_per_host=MAX_CONNECTIONS_PER_HOST,
        first_request_timeout_s=FIRST_REQUEST_TIMEOUT_S,
    )
    async with trio.open_nursery() as nursery:
        try:
            address = await nursery.start(server.run)
        except PortError as error:
            raise PortError(
                f"metrics cannot be served: {error.message}", hint="give another --metrics-listen <address>:<port>"
            ) from error
        task_status.started(address.url)


def parse_listen(text: str) -> tuple[str, int]:
    """`<host>:<port>`, an IPv6 address in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(
            f"metrics_listen is an address and a port, not {text[:100]!r}",
            hint="write --metrics-listen 127.0.0.1:9464, or 0.0.0.0:9464 for other machines",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@web.middleware
async def _read_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await reading_only(request, handler)
    except web.HTTPException as error:
        return refusal(request, error)
