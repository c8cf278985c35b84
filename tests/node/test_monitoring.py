"""Over HTTP: health answers 503 with reasons, and metrics can be had on loopback and where it is asked for."""

import http.client
import json
from urllib.parse import urlsplit

import pytest
import trio

from node.health import HealthWatch
from node.monitoring import parse_listen, serve_monitoring
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
            assert (await asked(url, "/health", host="evil.example"))[0] == 403
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
                assert (await asked(url, path))[0] == 404
            assert (await asked(url, "/metrics", "POST"))[0] == 405
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
