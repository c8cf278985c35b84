"""What the node's page consists of: its files, the live stream, and questions about one submission. Read-only.

GET /                                 the page
GET /assets/{name}                    its scripts and styles, a fixed list
GET /api/events                       the live stream (node.dashboard.stream)
GET /api/submissions/{id}             a submission with every verdict and check, as JSON
GET /api/submissions/{id}/rollouts    a part of its rollouts as text: ?first=N&count=N
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from aiohttp import web

from node.dashboard.reading import Page, RolloutDesk
from node.dashboard.sections import Sections
from node.dashboard.sources import Sources
from node.dashboard.stream import PERIOD_S, Hub
from node.dashboard.world import find_submission
from node.status import StatusBoard
from protocol.errors import NodeError, RefusedError

ASSETS: Final = Path(__file__).parent / "assets"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STATUS: Final = {"not-found": 404, "malformed": 400, "too-large": 413, "busy": 503, "timeout": 504}
PAGE_ROLLOUTS: Final = 32
MAX_FIRST: Final = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The page of one node. `run` it in trio beside the server that has its `routes`."""

    def __init__(self, board: StatusBoard, sources: Sources, *, log_path: Path, period_s: float = PERIOD_S) -> None:
        self._board = board
        self._sources = sources
        self._desk = RolloutDesk(sources, log_path=log_path)
        self._period_s = period_s
        self._hub: Hub | None = None
        self._token: trio.lowlevel.TrioToken | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read rollout files for the page until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        await self._desk.run(task_status=task_status)

    @property
    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get("/assets/{name}", self._asset),
            web.get("/api/events", self._events),
            web.get("/api/submissions/{id}", _answering(self._submission)),
            web.get("/api/submissions/{id}/rollouts", _answering(self._rollouts)),
        ]

    async def _page(self, request: web.Request) -> web.Response:
        return _file("index.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return _file(request.match_info["name"])

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._hub is None:
            self._hub = Hub(Sections(self._board, self._sources), period_s=self._period_s)
        if self._token is not None:
            self._token.run_sync_soon(self._sources.wanted.set, idempotent=True)
        return await self._hub.events(request)

    async def _submission(self, request: web.Request) -> dict[str, Any]:
        state = self._sources.ledger()
        key = _submission_id(request)
        found = await asyncio.to_thread(find_submission, state, key) if state is not None else None
        if found is None:
            raise RefusedError("no such submission in the ledger as this node has it", code="not-found")
        return found

    async def _rollouts(self, request: web.Request) -> dict[str, Any]:
        first = _number(request, "first", default=0, most=MAX_FIRST)
        count = _number(request, "count", default=PAGE_ROLLOUTS, most=2 * PAGE_ROLLOUTS)
        return await self._desk.read(Page(_submission_id(request), first, count))


def _answering(question: Callable[[web.Request], Awaitable[dict[str, Any]]]) -> Handler:
    """A handler that answers in JSON, also where it cannot: `{"error", "hint"}`."""

    @wraps(question)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            status, value = 200, await question(request)
        except NodeError as error:
            status = _STATUS.get(error.code, 409) if isinstance(error, RefusedError) else 502
            value = {"error": error.message, "hint": error.hint}
        return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")

    return answer


@cache
def _assets() -> dict[str, bytes]:
    """All files of the page by name: nothing else can be asked for."""
    return {path.name: path.read_bytes() for path in ASSETS.iterdir() if path.suffix in _TYPES}


def _file(name: str) -> web.Response:
    body = _assets().get(name)
    if body is None:
        raise web.HTTPNotFound
    return web.Response(body=body, content_type=_TYPES[Path(name).suffix], charset="utf-8")


def _submission_id(request: web.Request) -> bytes:
    text = request.match_info["id"]
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise RefusedError("a submission's id is 64 hexadecimal digits", code="malformed")
    return key


def _number(request: web.Request, name: str, *, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= most):
        raise RefusedError(f"{name} is a number from 0 to {most}", code="malformed")
    return int(text)
