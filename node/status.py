"""What a node says about itself: one board that its parts write to, shown on a loopback page.

`GET /status` answers JSON, `GET /` a page for people (node.dashboard); `GET /metrics` and `/health` are for monitoring
(node.monitoring). Only this computer can ask, and no other site's page (node.dashboard.guard). The URL of `/status`
lies in `<data_dir>/status.url`; when the node leaves, its last state is kept as `<data_dir>/status-final.json`.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from node.clock import now_ms
from node.states import STATES, State
from node.version import SOFTWARE
from protocol.atomic import write_atomically
from protocol.constants import SIGNATURE_DOMAIN
from protocol.errors import DataDirError, PortError
from protocol.identity import PeerId

if TYPE_CHECKING:
    import trio

    from node.dashboard.routes import Dashboard
    from node.health import HealthWatch
    from p2p.bridge import AioThread
    from p2p.http import BoundAddress, HttpServer

log = logging.getLogger(__name__)

Clock = Callable[[], int]

URL_FILE: Final = "status.url"
FINAL_FILE: Final = "status-final.json"
HOST: Final = "127.0.0.1"
MAX_CONNECTIONS: Final = 32
MAX_CONNECTIONS_PER_HOST: Final = 24
"""Sixteen streams of the page and some questions. All of this computer's users come from one address: there, who has
asked nothing makes way for whoever comes next (p2p.http)."""
MAX_TRANSITIONS: Final = 1000
MAX_RELAYS: Final = 256
MAX_TEXT_CHARS: Final = 300
_DAY_MS: Final = 86_400_000


class StatusBoard:
    """What a node does or waits for, and its counters. Synchronous; any thread may write."""

    def __init__(self, *, role: str, peer_id: PeerId | str, run: str, clock: Clock = now_ms) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        started_ms = clock()
        self._fields: dict[str, Any] = {
            "software": SOFTWARE,
            "protocol": SIGNATURE_DOMAIN,
            "role": role,
            "peer_id": str(peer_id),
            "run": run,
            "pid": os.getpid(),
            "started_ms": started_ms,
            "state": "starting",
            "activity": "starting",
            "since_ms": started_ms,
            "step": None,
            "checkpoint_step": None,
            "head_sequence": None,
            "accepted": 0,
            "pending": 0,
            "rejected": {},
        }
        self._details: dict[str, Any] = {}
        self._relays: dict[str, dict[str, Any]] = {}
        self._today = [0, 0, 0]
        """Day since 1970 (UTC), bytes in, bytes out."""
        self._timeline: deque[tuple[int, str, str]] = deque(maxlen=MAX_TRANSITIONS)

    def waiting(self, what: str) -> None:
        """The node can do nothing until `what` happens; a phrase such as "the checkpoint of step 4"."""
        self.state("waiting", what)

    def working(self, what: str) -> None:
        """The node is busy with `what`; a phrase such as "generating submission 2 of step 4"."""
        self.state("working", what)

    def state(self, state: State, what: str) -> None:
        """Any state. Saying the same again changes nothing, so `since_ms` tells when it began."""
        if state not in STATES:
            raise ValueError(f"no such state: {state!r}")
        what = what[:MAX_TEXT_CHARS]
        with self._lock:
            if (self._fields["state"], self._fields["activity"]) == (state, what):
                return
            now = self._clock()
            self._fields.update(state=state, activity=what, since_ms=now)
            self._timeline.append((now, "working" if state == "working" else "waiting", what))

    def update(self, **fields: Any) -> None:
        """Set top-level fields such as `step`, `accepted` or `rejected`."""
        with self._lock:
            unknown = fields.keys() - self._fields.keys()
            if unknown:
                raise TypeError(f"the status has no field {', '.join(sorted(unknown))}")
            self._fields.update(copy.deepcopy(fields))

    def details(self, **fields: Any) -> None:
        """Set fields of the role's own part."""
        with self._lock:
            self._details.update(copy.deepcopy(fields))

    def rows(self, **lists: Sequence[Mapping[str, Any]]) -> None:
        """Set long lists among these, of rows that nobody changes any more: they are not copied."""
        with self._lock:
            self._details.update({name: list(rows) for name, rows in lists.items()})

    def relay(
        self, peer_id: PeerId | str, url: str, *, bytes_in: int = 0, bytes_out: int = 0, failures: int = 0
    ) -> None:
        """Add to what this node has had from one relay. A relay beyond the first MAX_RELAYS is not counted."""
        name = str(peer_id)
        with self._lock:
            if name not in self._relays and len(self._relays) >= MAX_RELAYS:
                return
            row = self._relays.setdefault(
                name, {"peer_id": name, "url": url, "bytes_in": 0, "bytes_out": 0, "failures": 0}
            )
            row["url"] = url
            row["bytes_in"] += bytes_in
            row["bytes_out"] += bytes_out
            row["failures"] += failures
            self._count_today(bytes_in, bytes_out)

    def _count_today(self, bytes_in: int, bytes_out: int) -> None:
        day = self._clock() // _DAY_MS
        if self._today[0] != day:
            self._today = [day, 0, 0]
        self._today[1] += bytes_in
        self._today[2] += bytes_out

    def snapshot(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Everything but the details named, as plain values that nobody else holds."""
        with self._lock:
            return copy.deepcopy(
                {
                    **self._fields,
                    "now_ms": self._clock(),
                    "relays": list(self._relays.values()),
                    "today": self._traffic_today(),
                    "timeline": [list(entry) for entry in self._timeline],
                    "details": {name: value for name, value in self._details.items() if name not in without},
                }
            )

    def brief(self) -> dict[str, Any]:
        """The top-level fields alone, which is cheap: for whoever looks often."""
        with self._lock:
            return copy.deepcopy(self._fields)

    def _traffic_today(self) -> dict[str, int]:
        """Bytes from and to relays since midnight UTC, or since the start."""
        if self._today[0] != self._clock() // _DAY_MS:
            return {"bytes_in": 0, "bytes_out": 0}
        return {"bytes_in": self._today[1], "bytes_out": self._today[2]}

    def detail(self, name: str) -> Any:
        """One of the role's details, as a value that nobody else holds; None if it is not there."""
        with self._lock:
            return copy.deepcopy(self._details.get(name))


async def serve_status(
    board: StatusBoard,
    aio: AioThread,
    *,
    data_dir: Path,
    port: int = 0,
    dashboard: Dashboard | None = None,
    health: HealthWatch | None = None,
    task_status: trio.TaskStatus[str] | None = None,
) -> None:
    """Show the board, and the dashboard at `/`, until cancelled; the task status gives the URL. Raises PortError."""
    import trio
    from aiohttp import web

    from node.dashboard.guard import guard
    from node.monitoring import FIRST_REQUEST_TIMEOUT_S, monitoring_routes
    from p2p.http import HttpServer

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(board.snapshot()), content_type="application/json")

    routes: list[web.AbstractRouteDef] = [web.get("/status", answer), *monitoring_routes(board, data_dir, health)]
    try:
        async with trio.open_nursery() as nursery:
            if dashboard is not None:
                routes += dashboard.routes
                await nursery.start(dashboard.run)
            server = HttpServer(
                aio,
                routes,
                host=HOST,
                port=port,
                middlewares=[guard],
                max_connections=MAX_CONNECTIONS,
                max_connections_per_host=MAX_CONNECTIONS_PER_HOST,
                first_request_timeout_s=FIRST_REQUEST_TIMEOUT_S,
            )
            address = await _started(nursery, server)
            url = f"{address.url}/status"
            if dashboard is not None:
                board.details(dashboard=f"{address.url}/")
            write_atomically(data_dir / URL_FILE, url.encode() + b"\n", sync=False)
            if task_status is not None:
                task_status.started(url)
    finally:
        _keep_last_state(board, data_dir)


async def _started(nursery: trio.Nursery, server: HttpServer) -> BoundAddress:
    try:
        address: BoundAddress = await nursery.start(server.run)
    except PortError as error:
        raise PortError(
            f"the status page cannot be served: {error.message}",
            hint="give another --status-port; 0, the default, takes any free one",
        ) from error
    return address


def _keep_last_state(board: StatusBoard, data_dir: Path) -> None:
    try:
        (data_dir / URL_FILE).unlink(missing_ok=True)
        write_atomically(data_dir / FINAL_FILE, msgspec.json.encode(board.snapshot()), sync=False)
    except (OSError, DataDirError) as error:  # must not hide why the node ends
        log.warning("last status not kept error=%s", error)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this computer by a name that no DNS server can give away."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.lower() in ("127.0.0.1", "localhost", "[::1]")
