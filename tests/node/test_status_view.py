"""Showing a status on a terminal."""

import http.server
import threading

import msgspec
import pytest
from rich.console import Console

from node.status import FINAL_FILE, URL_FILE, StatusBoard
from node.status_view import fetch_status, render
from protocol.errors import DataDirError, NodeError


@pytest.fixture
def page(tmp_path):
    """Serves `page.body` at the URL that lies in the data directory."""

    class Page(http.server.BaseHTTPRequestHandler):
        body = b"{}"
        status = 200

        def do_GET(self):
            self.send_response(self.status)
            self.end_headers()
            self.wfile.write(self.body)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / URL_FILE).write_text(f"http://127.0.0.1:{server.server_port}/status\n")
        yield Page
        server.shutdown()


def shown(status, *, width=200):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(status))
    return capture.get()


def test_a_status_is_fetched_and_shown(page, tmp_path, alice, bob):
    board = StatusBoard(role="inference", peer_id=alice.peer_id, run=f"{bob.peer_id}/demo")
    board.working("generating submission 2 of step 4")
    board.update(step=4, accepted=3, rejected={"late": 2})
    board.relay(bob.peer_id, "http://1.2.3.4:5", bytes_in=77)
    board.details(tokens_per_s=12.5, rewards=[[0, 1.0]])
    page.body = msgspec.json.encode(board.snapshot())
    text = shown(fetch_status(tmp_path))
    for part in (
        "generating submission 2 of step 4",
        "3 accepted",
        "2 rejected (late)",
        f"relay {bob.peer_id}",
        "http://1.2.3.4:5: 77 bytes in, 0 bytes out, 0 failures",
        "12.5",
    ):
        assert part in text


def test_ids_are_whole_on_eighty_columns_and_no_relays_are_no_table(alice, bob):
    board = StatusBoard(role="inference", peer_id=alice.peer_id, run=f"{bob.peer_id}/demo")
    assert "bytes" not in shown(board.snapshot(), width=80)
    board.relay(bob.peer_id, "https://[2a00:1450:4001:2::1]:8470", bytes_in=10**9, failures=3)
    text = shown(board.snapshot(), width=80)
    assert str(alice.peer_id) in text
    assert f"relay {bob.peer_id}" in text
    assert "1000000000 bytes in" in text


def test_a_peers_text_is_neither_markup_nor_terminal_codes(alice):
    """Attack: a relay's refusal, shown as the activity, holds rich markup and escape sequences."""
    board = StatusBoard(role="inference", peer_id=alice.peer_id, run="r")
    board.waiting("[link=http://evil]click[/link] \x1b[2J")
    text = shown(board.snapshot())
    assert "[link=http://evil]click[/link] \\x1b[2J" in text
    assert "\x1b[2J" not in text


def test_no_node_runs(tmp_path):
    with pytest.raises(DataDirError, match="no node runs"):
        fetch_status(tmp_path)
    (tmp_path / FINAL_FILE).write_text('{"state": "finished", "activity": "the run is finished"}')
    with pytest.raises(DataDirError, match="the last one ended finished: the run is finished"):
        fetch_status(tmp_path)


def test_a_node_that_was_killed_does_not_answer(tmp_path):
    (tmp_path / URL_FILE).write_text("http://127.0.0.1:1/status\n")
    with pytest.raises(NodeError, match="does not answer"):
        fetch_status(tmp_path)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{", b"\xff"])
def test_another_programs_page_is_not_a_status(page, tmp_path, body):
    page.body = body
    with pytest.raises(NodeError):
        fetch_status(tmp_path)


def test_a_url_that_leads_elsewhere_is_refused(tmp_path):
    """Attack: the URL file is replaced to have the status fetched from another host."""
    (tmp_path / URL_FILE).write_text("http://evil.example/status\n")
    with pytest.raises(DataDirError, match="does not name a page of this computer"):
        fetch_status(tmp_path)
