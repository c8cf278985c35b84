"""The live stream: server-sent events (WHATWG HTML, section 9.2), one event a section of the page that changed.

A section's event replaces what came before, so a browser that reads slowly skips states and never makes this node keep
any: a stream owes it at most one event a section. The sections are looked at once a second while somebody is there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aiohttp import web

from node.dashboard.guard import HEADERS
from node.dashboard.sections import SERIES, Sections

log = logging.getLogger(__name__)

MAX_STREAMS: Final = 16
"""Of the server's connections; the others are for everything else."""
PERIOD_S: Final = 1.0
HEARTBEAT_S: Final = 15.0
WRITE_TIMEOUT_S: Final = 20.0
RETRY_MS: Final = 3000
"""When a browser comes back after the stream broke."""


class _Stream:
    """What one browser is still owed."""

    def __init__(self) -> None:
        self.owed: dict[str, None] = {}
        self.steps = 0
        self.wake = asyncio.Event()

    def owe(self, names: list[str]) -> None:
        self.owed.update(dict.fromkeys(names))
        self.wake.set()


class Hub:
    """All open streams of one node; used in the asyncio thread."""

    def __init__(self, sections: Sections, *, period_s: float) -> None:
        self._sections = sections
        self._period_s = period_s
        self._streams: set[_Stream] = set()
        self._looking: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Handler of the stream; ends when the browser goes."""
        if len(self._streams) >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{MAX_STREAMS} pages are open already: close one")
        stream = _Stream()
        self._streams.add(stream)
        try:
            return await self._serve(request, stream)
        finally:
            self._streams.discard(stream)

    async def _serve(self, request: web.Request, stream: _Stream) -> web.StreamResponse:
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(f"retry: {RETRY_MS}\n\n".encode())
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        async with self._lock:
            stream.owe(self._sections.names)
        silent_s = 0.0
        while not _gone(request):
            data = self._take(stream)
            if data or silent_s >= HEARTBEAT_S:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(data or b": still here\n\n")
                silent_s = 0.0
            silent_s += await _wait(stream.wake, self._period_s)
        return response

    async def _look(self) -> None:
        """Look at the node while somebody is there."""
        while self._streams:
            async with self._lock:
                changed = await asyncio.to_thread(self._sections.refresh)
            if changed:
                for stream in self._streams:
                    stream.owe(changed)
            await asyncio.sleep(self._period_s)

    def _take(self, stream: _Stream) -> bytes:
        stream.wake.clear()
        owed, stream.owed = stream.owed, {}
        return b"".join(self._event(stream, name) for name in owed)

    def _event(self, stream: _Stream, name: str) -> bytes:
        if name == SERIES:
            data, stream.steps = self._sections.steps(stream.steps)
        else:
            data = self._sections.text(name)
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _wait(event: asyncio.Event, timeout_s: float) -> float:
    """How long it took, at most."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return timeout_s
    return 0.0
