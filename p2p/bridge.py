"""The border between trio and asyncio: aiohttp lives in one thread with its own event loop.

The network process runs trio (libp2p needs it) while HTTP runs aiohttp. Coroutines cross the border by `AioThread.run`,
plain callbacks by `AioThread.call_soon`. Nothing else of this program touches asyncio from trio's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import trio

from protocol.errors import NodeError

log = logging.getLogger(__name__)

CANCEL_WAIT_S = 5.0
"""How long a cancelled call, or the shutdown of the thread, may keep trio waiting."""

P = ParamSpec("P")
T = TypeVar("T")


class AioThread:
    """A thread that runs an asyncio event loop for as long as the `async with` block lasts."""

    def __init__(self, *, name: str = "http") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AioThread:
        started = trio.Event()
        self._stopped = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, args=(loop, started), name=self._name, daemon=True).start()
        with trio.CancelScope(shield=True):
            await started.wait()
        self._loop = loop
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        with trio.move_on_after(CANCEL_WAIT_S + 1, shield=True):
            await self._stopped.wait()
        if not self._stopped.is_set():
            log.warning("thread=%s stopped=no waited_s=%.0f", self._name, CANCEL_WAIT_S + 1)

    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine function in the asyncio thread and return its result, or raise what it raised.

        Cancelling cancels the asyncio task and waits until it has ended, at most CANCEL_WAIT_S.
        """
        call: _Call[T] = _Call(self._running_loop(), self._wake)
        call.start(function(*args, **kwargs))
        try:
            await call.done.wait()
        except BaseException:
            call.cancel()
            with trio.move_on_after(CANCEL_WAIT_S, shield=True):
                await call.done.wait()
            raise
        return call.result()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Have the asyncio thread call a plain function soon; from any thread. Dropped when the thread has stopped."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("thread=%s callback=dropped", self._name)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise NodeError("the HTTP thread is not running: a request was made outside of its `async with` block")
        return self._loop

    def _wake(self, event: trio.Event) -> None:
        try:
            self._token.run_sync_soon(event.set)
        except trio.RunFinishedError:
            log.debug("thread=%s wake=dropped", self._name)

    def _serve(self, loop: asyncio.AbstractEventLoop, started: trio.Event) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(self._wake, started)
        try:
            loop.run_forever()
            loop.run_until_complete(_end_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            self._wake(self._stopped)


class _Call(Generic[T]):
    """One coroutine on its way through the asyncio thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[trio.Event], None]) -> None:
        self.done = trio.Event()
        self._loop = loop
        self._wake = wake
        self._task: asyncio.Task[T] | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._create, coroutine)
        except RuntimeError as error:
            coroutine.close()
            raise NodeError("the HTTP thread has stopped; no request can be made any more") from error

    def _create(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a cancelled caller never asks for it
        self._wake(self.done)

    def cancel(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            self.done.set()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        if self._task is None or self._task.cancelled():
            raise NodeError("the HTTP thread stopped while a request was under way")
        return self._task.result()


async def _end_tasks() -> None:
    """Cancel what is left on this loop and give it CANCEL_WAIT_S to end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, stuck = await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)
        for task in stuck:
            log.warning("task=%s ended=no waited_s=%.0f", task.get_name(), CANCEL_WAIT_S)
