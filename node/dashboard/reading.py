"""Reading rollout files for the page: asked by HTTP handlers (asyncio), done by a memory-limited child (trio).

The child (node.dashboard.read_compute) is started when the first page is asked for and ended when nobody reads, so that
an idle node does not pay for it. One request at a time, a few may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from node.compute.process import ComputeProcess
from node.dashboard.sources import Sources
from node.ledger.memory import looked_at
from protocol.errors import DataDirError, MalformedError, NodeError, RefusedError
from protocol.ledger import LedgerState, LedgerSubmission

log = logging.getLogger(__name__)

MEMORY_BYTES: Final = 2 << 30
"""Address space of the child: a file's rollouts and a tokenizer of some hundred thousand words."""
MAX_FILE_BYTES: Final = 64 << 20
MAX_WAITING: Final = 4
READ_TIMEOUT_S: Final = 60.0
IDLE_S: Final = 60.0
_ENV: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Page:
    """Which part of which submission's file is asked for."""

    submission: bytes
    first: int
    count: int


@dataclass(frozen=True)
class _Request:
    page: Page
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[dict[str, Any]]


class RolloutDesk:
    """`run` it in trio; `read` is for the asyncio thread."""

    def __init__(self, sources: Sources, *, log_path: Path) -> None:
        self._sources = sources
        self._process = ComputeProcess(
            "node.dashboard.read_compute",
            name="dashboard reader",
            log_path=log_path,
            env=_ENV,
            memory_bytes=MEMORY_BYTES,
        )
        self._send, self._receive = trio.open_memory_channel[_Request](MAX_WAITING)
        self._token: trio.lowlevel.TrioToken | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer requests until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        task_status.started()
        while True:
            request: _Request | None = await self._receive.receive()
            async with trio.open_nursery() as nursery:
                await nursery.start(self._process.run)
                while request is not None:
                    await self._answer(request)
                    request = await self._next()
                nursery.cancel_scope.cancel()

    async def read(self, page: Page) -> dict[str, Any]:
        """A page of a submission's rollouts as text. Raises NodeError: unknown, gone, malformed, busy."""
        if self._token is None:
            raise RefusedError("this node is still starting", code="busy")
        loop = asyncio.get_running_loop()
        request = _Request(page, loop, loop.create_future())
        with contextlib.suppress(trio.RunFinishedError):  # the node is leaving: the time runs out
            self._token.run_sync_soon(self._enqueue, request)
        try:
            async with asyncio.timeout(2 * READ_TIMEOUT_S):
                return await request.answer
        except TimeoutError as error:
            raise RefusedError("reading the file takes too long", code="timeout") from error

    def _enqueue(self, request: _Request) -> None:
        try:
            self._send.send_nowait(request)
        except trio.WouldBlock:
            _settle(request, RefusedError("other files are being read; try again in a moment", code="busy"))

    async def _next(self) -> _Request | None:
        with trio.move_on_after(IDLE_S):
            return await self._receive.receive()
        return None

    async def _answer(self, request: _Request) -> None:
        try:
            found = await self._page(request.page)
        except NodeError as error:
            _settle(request, error)
        except OSError as error:
            _settle(request, DataDirError(f"the file cannot be read: {error.strerror or error}"))
        else:
            _settle(request, found)

    async def _page(self, page: Page) -> dict[str, Any]:
        state, one = self._find(page.submission)
        obtain = self._sources.obtain
        if obtain is None:
            raise RefusedError("this node has no way to rollout files yet", code="not-found")
        async with obtain(page.submission, one) as path:
            found: dict[str, Any] = await self._process.call(
                "read",
                timeout_s=READ_TIMEOUT_S,
                path=str(path),
                tokenizer_dir=str(await self._sources.tokenizer() or ""),
                first=page.first,
                count=page.count,
                stop_ids=list(state.manifest.model.stop_ids),
                limits={
                    "max_rollouts": state.manifest.rollouts_per_submission,
                    "max_tokens": state.manifest.model.max_model_len,
                },
            )
        if "malformed" in found:
            raise MalformedError(f"the file is malformed: {found['malformed']}")
        return found

    def _find(self, submission: bytes) -> tuple[LedgerState, LedgerSubmission]:
        state = self._sources.ledger()
        one = looked_at(state.submissions, submission) if state is not None else None
        if state is None or one is None:
            raise RefusedError("no such submission in the ledger as this node has it", code="not-found")
        if one.record.size > MAX_FILE_BYTES:
            size = math.ceil(one.record.size / 1e6)
            raise RefusedError(f"a file of {size} MB; up to {MAX_FILE_BYTES >> 20} MiB are opened", code="too-large")
        return state, one


def _settle(request: _Request, outcome: dict[str, Any] | NodeError) -> None:
    """Hand the outcome over to the asyncio thread."""

    def settle() -> None:
        if request.answer.done():
            return
        if isinstance(outcome, NodeError):
            request.answer.set_exception(outcome)
        else:
            request.answer.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the asyncio thread has ended: nobody waits any more
        request.loop.call_soon_threadsafe(settle)
