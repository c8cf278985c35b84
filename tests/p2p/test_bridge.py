"""AioThread: results, errors, cancellation and shutdown across the border of trio and asyncio."""

import asyncio
import threading

import pytest
import trio

from p2p.bridge import AioThread
from protocol.errors import NodeError


async def test_run_gives_results_from_the_other_thread():
    async def where(tag, *, more):
        await asyncio.sleep(0)
        return tag, more, threading.current_thread().name

    with trio.fail_after(5):
        async with AioThread(name="aio-test") as aio:
            assert await aio.run(where, 1, more=2) == (1, 2, "aio-test")


async def test_run_raises_what_the_coroutine_raised():
    async def fail():
        raise KeyError("gone")

    with trio.fail_after(5):
        async with AioThread() as aio:
            with pytest.raises(KeyError, match="gone"):
                await aio.run(fail)


async def test_cancelling_ends_the_asyncio_task_before_run_returns():
    started, ended = trio.Event(), []
    token = trio.lowlevel.current_trio_token()

    async def wait_for_ever():
        try:
            token.run_sync_soon(started.set)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with trio.fail_after(5):
        async with AioThread() as aio:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(aio.run, wait_for_ever)
                await started.wait()
                nursery.cancel_scope.cancel()
            assert ended == [True]


async def test_leaving_the_block_ends_what_is_left_on_the_loop():
    ended = []

    async def leave_a_task():
        async def linger():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        leave_a_task.task = asyncio.create_task(linger())
        await asyncio.sleep(0)

    with trio.fail_after(10):
        async with AioThread() as aio:
            await aio.run(leave_a_task)
    assert ended == [True]


async def test_call_soon_wakes_a_coroutine_and_is_dropped_after_the_end():
    async def make_event():
        return asyncio.Event()

    with trio.fail_after(5):
        async with AioThread() as aio:
            event = await aio.run(make_event)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(aio.run, event.wait)
                aio.call_soon(event.set)
    aio.call_soon(event.set)


async def test_a_request_outside_of_the_block_is_an_error_with_a_name():
    async def nothing():
        pass

    aio = AioThread()
    with pytest.raises(NodeError, match="not running"):
        await aio.run(nothing)
