"""Over HTTP: health answers 503 with reasons, and metrics can be had on loopback and where it is asked for."""

import http.client
import json
import socket
from contextlib import ExitStack, asynccontextmanager, closing
from urllib.parse import urlsplit

import pytest
import trio

from node.health import HealthWatch
from node.monitoring import (
    FIRST_REQUEST_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_HOST,
    parse_listen,
    serve_monitoring,
)
from node.status import StatusBoard, serve_status
from p2p.bridge import AioThread
from p2p.http import listening_socket
from protocol.errors import ConfigError, PortError


def ask(url, path, method="GET", host=None):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


async def asked(*args, **options):
    return await trio.to_thread.run_sync(lambda: ask(*args, **options))


@pytest.fixture
def board():
    return StatusBoard(role="inference", peer_id="alice", run="run")


async def test_health_and_metrics_on_the_status_server(board, tmp_path):
    watch = HealthWatch(board, 600.0)
    with trio.fail_after(30):
        async with AioThread() as aio, trio.open_nursery() as nursery:

            async def serve(task_status):
                await serve_status(board, aio, data_dir=tmp_path, health=watch, task_status=task_status)

            url = await nursery.start(serve)
            status, body = await asked(url, "/health")
            assert status == 503
            assert json.loads(body)["reasons"] == ["not in the run yet: starting"]
            assert (await asked(url, "/health/live"))[0] == 200
            assert (await asked(url, "/health/ready"))[0] == 503
            board.update(step=1, head_sequence=1)
            board.working("generating")
            watch.look()
            assert (await asked(url, "/health"))[0] == 200
            board.state("evicted", "reward: forged")
            status, body = await asked(url, "/health/ready")
            assert (status, json.loads(body)["reasons"]) == (503, ["evicted: reward: forged"])
            text = (await asked(url, "/metrics"))[1].decode()
            assert "intellect_ready 0\n" in text
            assert "intellect_live 1\n" in text
            assert 'intellect_state{state="evicted"} 1\n' in text
            assert "intellect_process_resident_bytes " in text
            status, body = await asked(url, "/health", host="evil.example")
            assert (status, set(json.loads(body))) == (403, {"error", "hint"})
            nursery.cancel_scope.cancel()


async def test_other_machines_get_metrics_and_health_alone(board, tmp_path):
    """Attack: whoever reaches the metrics port reads the status, or changes something."""
    with trio.fail_after(30):
        async with AioThread() as aio, trio.open_nursery() as nursery:

            async def serve(task_status):
                watch = HealthWatch(board, 600.0)
                await serve_monitoring(
                    board, aio, listen="127.0.0.1:0", data_dir=tmp_path, watch=watch, task_status=task_status
                )

            url = await nursery.start(serve)
            assert b"intellect_accepted_total 0\n" in (await asked(url, "/metrics", host="node.example:9464"))[1]
            for path in ("/status", "/", "/api/events"):
                status, body = await asked(url, path)
                assert (status, set(json.loads(body))) == (404, {"error", "hint"})
            status, body = await asked(url, "/metrics", "POST")
            assert (status, set(json.loads(body))) == (405, {"error", "hint"})
            nursery.cancel_scope.cancel()


async def test_a_taken_port_is_named(board, tmp_path):
    with listening_socket("127.0.0.1", 0) as taken:
        async with AioThread() as aio:
            with trio.fail_after(30), pytest.raises(BaseExceptionGroup) as caught:
                await serve_monitoring(
                    board,
                    aio,
                    listen=f"127.0.0.1:{taken.getsockname()[1]}",
                    data_dir=tmp_path,
                    watch=HealthWatch(board, 0.0),
                )
    (error,) = caught.value.exceptions
    assert isinstance(error, PortError)
    assert "--metrics-listen" in error.hint


@pytest.mark.parametrize(
    ("text", "found"), [("0.0.0.0:9464", ("0.0.0.0", 9464)), ("[::1]:1", ("::1", 1)), ("host:0", ("host", 0))]
)
def test_listen_addresses(text, found):
    assert parse_listen(text) == found


@pytest.mark.parametrize("text", ["9464", ":9464", "host:", "host:70000", "host:x", "host:٣"])
def test_listen_addresses_that_are_none(text):
    with pytest.raises(ConfigError, match="an address and a port"):
        parse_listen(text)


def half_open(url, source):
    """A connection from one of this computer's addresses that sends half a request."""
    parts = urlsplit(url)
    made = socket.create_connection((parts.hostname, parts.port), timeout=10, source_address=(source, 0))
    made.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    return made


def flood(url, sources):
    """A connection from each source, oldest first; whether the first one was closed, and whether health answers."""
    with ExitStack() as stack:
        held = [stack.enter_context(closing(half_open(url, source))) for source in sources]
        answered = ask(url, "/health/live")[0] == 200
        try:
            closed = held[0].recv(1) == b""
        except ConnectionResetError:
            closed = True
        except TimeoutError:
            closed = False
        return closed, answered


@asynccontextmanager
async def watched(board, tmp_path):
    with trio.fail_after(60):
        async with AioThread() as aio, trio.open_nursery() as nursery:

            async def serve(task_status):
                watch = HealthWatch(board, 600.0)
                await serve_monitoring(
                    board, aio, listen="127.0.0.1:0", data_dir=tmp_path, watch=watch, task_status=task_status
                )

            yield await nursery.start(serve)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("addresses", "each"),
    [(1, MAX_CONNECTIONS_PER_HOST), (MAX_CONNECTIONS // MAX_CONNECTIONS_PER_HOST, MAX_CONNECTIONS_PER_HOST)],
    ids=["one address", "as many as there is room for"],
)
async def test_half_open_connections_keep_nobody_from_asking(board, tmp_path, monkeypatch, addresses, each):
    """Attack: from one address, and from several, connections that never finish their request, on all places."""
    monkeypatch.setattr("node.monitoring.FIRST_REQUEST_TIMEOUT_S", 600.0)
    sources = [f"127.0.0.{2 + number % addresses}" for number in range(addresses * each)]
    sources = ["127.0.0.1"] * each if addresses == 1 else sources
    async with watched(board, tmp_path) as url:
        closed, answered = await trio.to_thread.run_sync(flood, url, sources)
    assert answered
    assert closed, "the oldest one made way: places are bounded"


async def test_half_open_connections_at_the_status_port_keep_nobody_from_asking(board, tmp_path, monkeypatch):
    """Attack: another user of this computer holds every place at the status port."""
    monkeypatch.setattr("node.monitoring.FIRST_REQUEST_TIMEOUT_S", 600.0)
    with trio.fail_after(60):
        async with AioThread() as aio, trio.open_nursery() as nursery:

            async def serve(task_status):
                await serve_status(board, aio, data_dir=tmp_path, task_status=task_status)

            url = await nursery.start(serve)
            closed, answered = await trio.to_thread.run_sync(flood, url, ["127.0.0.1"] * 40)
            nursery.cancel_scope.cancel()
    assert (closed, answered) == (True, True)


def test_monitoring_waits_seconds_for_a_request_and_gives_one_machine_a_part_of_its_places():
    assert MAX_CONNECTIONS <= 64
    assert 2 * MAX_CONNECTIONS_PER_HOST <= MAX_CONNECTIONS
    assert FIRST_REQUEST_TIMEOUT_S <= 10
