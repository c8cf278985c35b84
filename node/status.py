"""What a node says about itself: one board that its parts write to, shown on a loopback page.

`GET /status` answers JSON. Only this computer can ask, and only by a loopback name: a web page that has its own name
resolve to 127.0.0.1 is refused by the Host header. The page's URL lies in `<data_dir>/status.url`; when the node
leaves, its last state is kept as `<data_dir>/status-final.json`.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from node.clock import now_ms
from node.version import SOFTWARE
from protocol.atomic import write_atomically
from protocol.constants import SIGNATURE_DOMAIN
from protocol.errors import DataDirError
from protocol.identity import PeerId

if TYPE_CHECKING:
    import trio

    from p2p.bridge import AioThread

log = logging.getLogger(__name__)

State = Literal["starting", "waiting", "working", "evicted", "finished", "stopping"]
Clock = Callable[[], int]

URL_FILE: Final = "status.url"
FINAL_FILE: Final = "status-final.json"
HOST: Final = "127.0.0.1"
MAX_TRANSITIONS: Final = 1000
MAX_RELAYS: Final = 256
MAX_TEXT_CHARS: Final = 300


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
        self._timeline: deque[tuple[int, str, str]] = deque(maxlen=MAX_TRANSITIONS)

    def waiting(self, what: str) -> None:
        """The node can do nothing until `what` happens; a phrase such as "the checkpoint of step 4"."""
        self.state("waiting", what)

    def working(self, what: str) -> None:
        """The node is busy with `what`; a phrase such as "generating submission 2 of step 4"."""
        self.state("working", what)

    def state(self, state: State, what: str) -> None:
        """Any state. Saying the same again changes nothing, so `since_ms` tells when it began."""
        if state not in get_args(State):
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

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain values that nobody else holds."""
        with self._lock:
            return copy.deepcopy(
                {
                    **self._fields,
                    "now_ms": self._clock(),
                    "relays": list(self._relays.values()),
                    "timeline": [list(entry) for entry in self._timeline],
                    "details": self._details,
                }
            )


async def serve_status(
    board: StatusBoard,
    aio: AioThread,
    *,
    data_dir: Path,
    port: int = 0,
    task_status: trio.TaskStatus[str] | None = None,
) -> None:
    """Show the board until cancelled; the task status gives the URL. Raises PortError."""
    import trio
    from aiohttp import web

    from p2p.http import HttpServer

    async def answer(request: web.Request) -> web.Response:
        if not is_loopback(request.headers.get("Host", "")):
            raise web.HTTPForbidden(reason="the status is for this computer alone")
        return web.Response(body=msgspec.json.encode(board.snapshot()), content_type="application/json")

    try:
        async with trio.open_nursery() as nursery:
            server = HttpServer(aio, [web.get("/status", answer)], host=HOST, port=port, max_connections=32)
            address = await nursery.start(server.run)
            url = f"{address.url}/status"
            write_atomically(data_dir / URL_FILE, url.encode() + b"\n", sync=False)
            if task_status is not None:
                task_status.started(url)
    finally:
        _keep_last_state(board, data_dir)


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
