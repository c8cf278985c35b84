"""The status board and its loopback page."""

import http.client
import json
from urllib.parse import urlsplit

import pytest
import trio

from node.status import FINAL_FILE, MAX_RELAYS, MAX_TRANSITIONS, URL_FILE, StatusBoard, is_loopback, serve_status
from p2p.bridge import AioThread
from protocol.identity import Identity


class FakeClock:
    now = 1000

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def board(clock):
    alice = Identity.from_phrase("alice").peer_id
    return StatusBoard(role="inference", peer_id=alice, run=f"{alice}/demo", clock=clock)


def test_a_fresh_board_says_who_it_is(board):
    shown = board.snapshot()
    assert shown["state"] == "starting"
    assert shown["role"] == "inference"
    assert shown["started_ms"] == shown["now_ms"] == 1000
    assert shown["step"] is None
    assert json.loads(json.dumps(shown)) == shown


def test_since_tells_when_the_activity_began(board, clock):
    board.waiting("the head")
    clock.now = 2000
    board.waiting("the head")
    assert board.snapshot()["since_ms"] == 1000
    board.working("generating")
    assert board.snapshot()["since_ms"] == 2000
    assert board.snapshot()["timeline"] == [[1000, "waiting", "the head"], [2000, "working", "generating"]]


def test_other_states_count_as_waiting_in_the_timeline(board):
    board.state("finished", "the run is finished")
    assert board.snapshot()["state"] == "finished"
    assert board.snapshot()["timeline"] == [[1000, "waiting", "the run is finished"]]


def test_the_board_stays_bounded(board):
    """Attack: relays that come and go, and a node that runs for months."""
    for number in range(2 * MAX_TRANSITIONS):
        board.working(f"{number} " + "x" * 10_000)
        board.relay(f"peer {number}", "http://x", bytes_in=1)
    shown = board.snapshot()
    assert len(shown["timeline"]) == MAX_TRANSITIONS
    assert len(shown["relays"]) == MAX_RELAYS
    assert len(shown["activity"]) < 1000


def test_relay_counters_add_up(board):
    board.relay("r", "http://old", bytes_in=5)
    board.relay("r", "http://new", bytes_in=2, bytes_out=3, failures=1)
    assert board.snapshot()["relays"] == [
        {"peer_id": "r", "url": "http://new", "bytes_in": 7, "bytes_out": 3, "failures": 1}
    ]


def test_a_misspelt_field_is_refused(board):
    with pytest.raises(TypeError, match="no field accepting"):
        board.update(accepting=3)
    with pytest.raises(ValueError, match="no such state"):
        board.state("idle", "nothing")


def test_what_is_shown_is_nobody_elses(board):
    reasons = {"late": 1}
    board.update(rejected=reasons)
    board.details(rewards=[[0, 0.5]])
    reasons["late"] = 2
    board.snapshot()["details"]["rewards"].append("x")
    assert board.snapshot()["rejected"] == {"late": 1}
    assert board.snapshot()["details"] == {"rewards": [[0, 0.5]]}


def fetch(url, host=None):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        connection.request("GET", parts.path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


async def test_the_page_answers_this_computer_alone(board, tmp_path):
    """Attack: DNS rebinding; a web page reads the status through a name that resolves to 127.0.0.1."""
    with trio.fail_after(30):
        async with AioThread() as aio, trio.open_nursery() as nursery:

            async def serve(task_status):
                await serve_status(board, aio, data_dir=tmp_path, task_status=task_status)

            url = await nursery.start(serve)
            assert (tmp_path / URL_FILE).read_text().strip() == url
            status, body = await trio.to_thread.run_sync(fetch, url)
            assert status == 200
            assert json.loads(body)["role"] == "inference"
            status, body = await trio.to_thread.run_sync(fetch, url.replace("/status", "/metrics"))
            assert status == 200
            assert b"# TYPE intellect_accepted_total counter\nintellect_accepted_total 0\n" in body
            for page in (url, url.replace("/status", "/metrics")):
                status, _ = await trio.to_thread.run_sync(fetch, page, "evil.example:80")
                assert status == 403
            board.state("finished", "the run is finished")
            nursery.cancel_scope.cancel()
    assert not (tmp_path / URL_FILE).exists()
    assert json.loads((tmp_path / FINAL_FILE).read_bytes())["state"] == "finished"


async def test_a_disk_that_refuses_the_last_state_does_not_hide_the_end(board, tmp_path, caplog):
    (tmp_path / FINAL_FILE).mkdir()
    with trio.fail_after(30):
        async with AioThread() as aio, trio.open_nursery() as nursery:

            async def serve(task_status):
                await serve_status(board, aio, data_dir=tmp_path, task_status=task_status)

            await nursery.start(serve)
            nursery.cancel_scope.cancel()
    assert "last status not kept" in caplog.text


@pytest.mark.parametrize(
    ("host", "ok"),
    [
        ("127.0.0.1:80", True),
        ("localhost", True),
        ("[::1]:9", True),
        ("[::1]", True),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("evil.example:80", False),
    ],
)
def test_loopback_names(host, ok):
    assert is_loopback(host) is ok
