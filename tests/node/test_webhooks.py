"""Webhooks against a real HTTP server on loopback: signed, repeated, given up, never in the way, without secrets."""

import hashlib
import hmac
import http.server
import json
import threading

import pytest
import trio

from node.health import HealthWatch
from node.status import StatusBoard
from node.webhooks import QUEUE_CALLS, SIGNATURE, Webhooks, host_of, sign
from p2p.bridge import AioThread
from p2p.http import HttpClient


class Service:
    """Answers with `answers` one after the other, then 200; keeps what it was sent."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []
        self.called = threading.Event()
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.calls.append((dict(self.headers), body))
                self.send_response(service.answers.pop(0) if service.answers else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                service.called.set()

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook/very-secret-token"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def events(self):
        return [json.loads(body)["event"] for _, body in self.calls]


@pytest.fixture
def board():
    board = StatusBoard(role="inference", peer_id="alice", run="run")
    board.update(step=1, head_sequence=1)
    board.working("generating")
    return board


async def while_running(hooks, act):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hooks.run)
        act()
        await hooks.finish()
        nursery.cancel_scope.cancel()


async def test_events_arrive_signed(board):
    with Service() as service, trio.fail_after(30):
        async with AioThread() as aio, HttpClient(aio) as client:
            hooks = Webhooks([service.url], client, board, secret="hush")
            watch = HealthWatch(board, 600.0)
            watch.on_look.append(hooks.look)
            watch.look()

            def act():
                board.update(checkpoint_step=4)
                watch.look()
                watch.look()
                board.state("evicted", "toploc: x")
                watch.look()

            await while_running(hooks, act)
    assert service.events == ["checkpoint", "evicted"]
    headers, body = service.calls[1]
    said = json.loads(body)
    assert (said["text"], said["role"], said["peer_id"], said["step"]) == ("toploc: x", "inference", "alice", 1)
    at, tag = (part.partition("=")[2] for part in headers[SIGNATURE].split(","))
    assert tag == hmac.new(b"hush", f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    assert board.snapshot()["details"]["webhooks"] == {"delivered": 2, "dropped": 0}


async def test_a_stall_and_its_end_are_told_once(board):
    class Clock:
        now = 0

        def __call__(self):
            return self.now

    clock = Clock()
    with Service() as service, trio.fail_after(30):
        async with AioThread() as aio, HttpClient(aio) as client:
            hooks = Webhooks([service.url], client, board)
            watch = HealthWatch(board, 60.0, clock=clock)
            watch.on_look.append(hooks.look)

            def act():
                clock.now = 61_000
                watch.look()
                watch.look()
                board.update(accepted=1)
                watch.look()

            await while_running(hooks, act)
    assert service.events == ["stalled", "recovered"]
    assert SIGNATURE not in service.calls[0][0]


async def test_a_service_that_fails_is_asked_again_then_given_up(board, caplog):
    """The URL's path is often a token: it shows in no log."""
    with Service(500, 302, *[503] * 9) as service, trio.fail_after(30):
        async with AioThread() as aio, HttpClient(aio) as client:
            hooks = Webhooks([service.url], client, board, attempts=3, first_pause_s=0.0, secret="hush")
            await while_running(hooks, lambda: hooks.post("evicted", board.brief(), text="x"))
            service.answers = [500]
            await while_running(hooks, lambda: hooks.post("evicted", board.brief(), text="x"))
    assert len(service.calls) == 5
    assert (hooks.delivered, hooks.dropped) == (1, 1)
    assert "webhook host=127.0.0.1 dropped=1" in caplog.text
    assert "very-secret-token" not in caplog.text
    assert "hush" not in caplog.text


async def test_a_dead_service_never_holds_the_node(board, caplog):
    """Attack, or accident: nobody listens, and events come in a flood."""
    with trio.fail_after(30):
        async with AioThread() as aio, HttpClient(aio) as client:
            hooks = Webhooks(["http://127.0.0.1:9/secret"], client, board, attempts=1)

            def flood():
                for _ in range(3 * QUEUE_CALLS):
                    hooks.post("checkpoint", board.brief(), text="x" * 10_000)

            flood()
            assert hooks.dropped == 2 * QUEUE_CALLS
            await while_running(hooks, lambda: None)
            assert hooks.dropped == 3 * QUEUE_CALLS
    assert "/secret" not in caplog.text


async def test_one_slow_service_does_not_hold_another(board):
    with Service() as service, trio.fail_after(30):
        async with AioThread() as aio, HttpClient(aio) as client:
            urls = ["http://127.0.0.1:9/", service.url]
            hooks = Webhooks(urls, client, board, attempts=2, first_pause_s=10_000.0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hooks.run)
                hooks.post("evicted", board.brief(), text="x")
                assert await trio.to_thread.run_sync(service.called.wait, 20)
                nursery.cancel_scope.cancel()
    assert service.events == ["evicted"]


def test_the_signature_covers_time_and_body():
    assert sign("a", b"x", at_s=1) != sign("a", b"x", at_s=2)
    assert sign("a", b"x", at_s=1) != sign("a", b"y", at_s=1)
    assert sign("a", b"x", at_s=1) != sign("b", b"x", at_s=1)


@pytest.mark.parametrize(("url", "host"), [("https://u:p@h.example/t?k=1", "h.example"), ("http://[", "?"), ("x", "?")])
def test_what_is_shown_of_a_url(url, host):
    assert host_of(url) == host
