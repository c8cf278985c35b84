"""Links without root: real sockets, and time that passes only where somebody waits for it."""

import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from simnet.proxy import NODE_VARIABLE, Bucket, Door, Links, Owners, Plan, serve


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def proxied(links_of, *, caller="client"):
    """A server that echoes, behind a proxy; the links and a way to connect."""
    target, port = free_port(), free_port()
    plan = links_of([Door("server", port, target)])
    links = Links(plan)

    async def echo(stream):
        async with stream:
            async for data in stream:
                await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_tcp, echo, target, host="127.0.0.1"))
        await nursery.start(partial(serve, plan, links, owner=lambda *_: caller))
        yield links, partial(trio.open_tcp_stream, "127.0.0.1", port)
        nursery.cancel_scope.cancel()


async def exchange(stream, data):
    """Send all, end, and read all that comes back; the seconds it took."""
    started = trio.current_time()
    received = bytearray()
    async with stream, trio.open_nursery() as nursery:

        async def send():
            await stream.send_all(data)
            await stream.send_eof()

        nursery.start_soon(send)
        async for part in stream:
            received += part
    assert bytes(received) == data
    return trio.current_time() - started


async def ended(stream):
    try:
        return await stream.receive_some(1) == b""
    except trio.BrokenResourceError:
        return True


async def test_bytes_come_through_in_order_and_both_ends_are_passed_on():
    with trio.fail_after(20):
        async with proxied(Plan) as (_, connect):
            assert await exchange(await connect(), os.urandom(300_000)) < 20


async def test_delays_of_both_nodes_add_up_in_each_direction():
    plan = partial(Plan, delay_ms={"client": 40, "server": 60})
    with trio.fail_after(20):
        async with proxied(plan) as (_, connect):
            assert await exchange(await connect(), b"x") >= 0.2


async def test_connections_of_a_node_share_its_rate():
    plan = partial(Plan, up_mbit={"client": 4})
    with trio.fail_after(20):
        async with proxied(plan) as (_, connect):
            started = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(exchange, await connect(), bytes(100_000))
            assert trio.current_time() - started >= 200_000 / 500_000 - 0.05


async def test_another_nodes_rate_is_not_its_own():
    with trio.fail_after(20):
        async with proxied(partial(Plan, up_mbit={"somebody": 0.001})) as (_, connect):
            await exchange(await connect(), bytes(100_000))


async def test_nothing_passes_between_two_sides_and_the_connection_lives_on():
    with trio.fail_after(20):
        async with proxied(Plan) as (links, connect), await connect() as stream:
            await stream.send_all(b"before")
            assert await stream.receive_some(100) == b"before"
            links.part({"client": "away"})
            await stream.send_all(b"after")
            async with await connect() as late:
                await late.send_all(b"new")
                with trio.move_on_after(0.3) as waited:
                    await stream.receive_some(100)
                assert waited.cancelled_caught
                links.part({})
                assert await stream.receive_some(100) == b"after"
                assert await late.receive_some(100) == b"new"


async def test_a_server_that_is_not_there_ends_the_connection():
    port = free_port()
    plan = Plan([Door("server", port, free_port())])
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, plan, Links(plan), owner=lambda *_: ""))
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert await ended(stream)
            nursery.cancel_scope.cancel()


def test_a_bucket_passes_what_its_rate_allows(autojump_clock):
    async def main():
        bucket, start = Bucket(8000), trio.current_time()
        assert bucket.pass_at(500) == pytest.approx(start + 0.5)
        assert bucket.pass_at(500) == pytest.approx(start + 1.0)
        await trio.sleep(10)
        assert bucket.pass_at(1000) == pytest.approx(start + 11)

    trio.run(main, clock=autojump_clock)


def test_who_dialled_is_known_by_the_environment_of_the_process():
    """Among all processes of this machine it is the one whose socket it is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            f"import socket,sys; s=socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); sys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, env={**os.environ, NODE_VARIABLE: "inference-7"}
        )
        try:
            accepted, peer = server.accept()
            accepted.close()
            assert Owners()(peer[1], server.getsockname()[1]) == "inference-7"
        finally:
            child.communicate()
    assert Owners()(1, 2) == ""
