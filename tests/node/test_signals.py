"""Leaving on signals."""

import os
import signal

import pytest
import trio

from node.signals import leave_on_signal


async def test_the_first_signal_leaves_gracefully():
    left = trio.Event()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def wait(task_status):
                await leave_on_signal(left.set, task_status=task_status, leave_now=pytest.fail)

            await nursery.start(wait)
            os.kill(os.getpid(), signal.SIGTERM)
            await left.wait()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("again", [True, False])
async def test_a_second_signal_or_the_deadline_ends_it(again):
    codes = []
    left = trio.Event()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def wait(task_status):
                await leave_on_signal(
                    left.set, grace_s=60 if again else 0.01, leave_now=codes.append, task_status=task_status
                )

            await nursery.start(wait)
            os.kill(os.getpid(), signal.SIGINT)
            await left.wait()
            if again:
                os.kill(os.getpid(), signal.SIGINT)
    assert codes == [128 + signal.SIGINT]
