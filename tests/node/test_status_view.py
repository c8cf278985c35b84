"""Showing a status on a terminal."""

import http.server
import subprocess
import sys
import threading

import msgspec
import pytest
from rich.console import Console

from node.status import FINAL_FILE, URL_FILE, StatusBoard
from node.status_view import fetch_status, how_it_ended, print_status, render
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
        "http://1.2.3.4:5: 77 bytes in, 0 bytes out",
        "12.5",
    ):
        assert part in text


def test_ids_are_whole_on_eighty_columns_and_no_relays_are_no_table(alice, bob):
    board = StatusBoard(role="inference", peer_id=alice.peer_id, run=f"{bob.peer_id}/demo")
    assert "relay " not in shown(board.snapshot(), width=80)
    board.relay(bob.peer_id, "https://[2a00:1450:4001:2::1]:8470", bytes_in=10**9, failures=3)
    text = shown(board.snapshot(), width=80)
    assert str(alice.peer_id) in text
    assert f"relay {bob.peer_id}" in text
    assert "1.0 GB in, 0 bytes out, 3 failures" in text


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
    with pytest.raises(DataDirError, match="the last one ended with its run"):
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


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ({"state": "stopping", "activity": "handing in finished rollouts"}, "left, as it was asked to"),
        ({"state": "stopping", "details": {"outbox": 2}}, "left, as it was asked to; 2 finished submissions kept for"),
        ({"state": "evicted", "activity": "toploc: hard"}, "ended, evicted: toploc: hard"),
        ({"state": "waiting", "activity": "a relay\x1b[2J"}, "ended while it was waiting: a relay\\x1b[2J"),
    ],
)
def test_how_a_node_ended_is_told_in_words(last, said):
    assert how_it_ended(last).startswith(said)


def test_details_are_in_words_and_units(alice):
    board = StatusBoard(role="inference", peer_id=alice.peer_id, run="r")
    board.details(downloaded_today=4_803_902, download_per_day=0, policies_quota=0, policies_bytes=1_500_000)
    board.details(patched_bytes=296_450, full_bytes=2_000_000, saved_bytes=1_700_000, outbox=1, could_not_tell=0)
    board.details(tokens_per_s=1234.5, clock="0.1 s behind", someone_elses_bytes=5_000, a_new_s=600)
    board.details(join="intellect-node --role inference --run r")
    rows = {line[:22].strip(): line[22:].strip() for line in shown(board.snapshot()).splitlines()}
    found = {
        "downloaded today": "4.8 MB",
        "policies on disk": "1.5 MB",
        "weights": "296.4 kB came as patches, 2.0 MB whole; 1.7 MB did not have to",
        "to be handed in": "1 submission",
        "speed": "1,234.5 tokens a second",
        "clock": "0.1 s behind",
        "someone elses bytes": "5.0 kB",
        "a new s": "10 min",
    }
    assert found.items() <= rows.items()
    assert not [name for name in rows if "_" in name or name in ("policies quota", "could not be judged", "join")]
    board.details(download_per_day=10**9, policies_quota=2 * 10**9)
    text = shown(board.snapshot())
    assert "4.8 MB of 1.0 GB a day at most" in text
    assert "1.5 MB of 2.0 GB at most" in text


def test_a_relays_counts_are_in_words(alice):
    board = StatusBoard(role="relay", peer_id=alice.peer_id, run="r")
    board.details(submissions=1200, verdicts_held=7, file_bytes=10**9, disk_quota_bytes=64 * 10**9, ledger_length=3000)
    board.details(bytes_today=5, bytes_per_day=0, evicted=1)
    text = shown(board.snapshot())
    assert "1,200 submissions, 7 verdicts, 1.0 GB of 64.0 GB at most of files" in text
    assert "3,000 entries" in text
    assert "1 node" in text


def test_the_line_to_join_with_can_be_copied(alice, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    line = f"intellect-node --role inference --run {alice.peer_id}/demo@/ip4/203.0.113.7/tcp/8471/p2p/{alice.peer_id}"
    board = StatusBoard(role="relay", peer_id=alice.peer_id, run="r")
    board.details(join=line)
    print_status(board.snapshot())
    assert line in capsys.readouterr().out.splitlines()


def watching(tmp_path):
    return subprocess.Popen(
        [sys.executable, "-c", "import cli; cli.main()", "status", "--watch", "--data-dir", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_watching_into_a_pipe_gives_snapshots_until_nobody_reads(page, tmp_path, alice):
    board = StatusBoard(role="inference", peer_id=alice.peer_id, run="r")
    board.working("generating submission 2 of step 4")
    page.body = msgspec.json.encode(board.snapshot())
    with watching(tmp_path) as command:
        seen = 0
        for line in command.stdout:
            seen += "generating submission 2" in line and line.startswith(" state")
            if seen == 2:
                break
        command.stdout.close()
        assert command.wait(30) == 0
        assert command.stderr.read() == ""
