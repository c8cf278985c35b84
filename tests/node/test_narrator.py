"""What a person is told while a node starts and works."""

import io

import pytest
import trio

from node.logs import LineFormatter
from node.narrator import Story, TerminalLine, bar, narrate, present, progress_text
from node.progress import DownloadProgress
from node.status import StatusBoard
from node.words import span


@pytest.fixture
def board(alice, bob):
    return StatusBoard(role="inference", peer_id=alice.peer_id, run=f"{bob.peer_id}/demo", clock=lambda: 60_000)


def told(story, board):
    return story.look(board.snapshot()).milestones


def test_each_milestone_is_told_once(board):
    story = Story()
    assert told(story, board) == []
    board.details(relays_known=2)
    assert told(story, board) == ["found the run and 2 relays"]
    board.details(relays_known=3, download={"bytes": 1, "total_bytes": 5_000_000, "bytes_per_s": 0})
    assert told(story, board) == []
    board.update(checkpoint_step=4)
    board.details(download=None)
    assert told(story, board) == ["policy of step 4 is here: 5.0 MB"]
    board.details(self_test={"answers": 4, "share": 0.25})
    assert told(story, board) == ["self-check: 4 answers, 25% of the tightest limit used; it can work"]
    first = {"rollouts": 32, "step": 4, "tokens": 99, "validator": "abc", "kept": "/d/outbox.sqlite"}
    board.details(first_accepted={**first, "submission": "0123456789abcdef"})
    (line,) = told(story, board)
    assert "first work accepted: 32 rollouts of step 4" in line
    assert "kept in /d/outbox.sqlite; show it: intellect-node verdict show 0123456789ab --data-dir /d" in line
    board.state("finished", "the run is finished")
    assert told(story, board) == ["finished: the run is finished"]
    assert told(story, board) == []


def test_later_policies_are_everyday_life(board):
    """And one that was on the disk before needs no download to be told of."""
    story = Story()
    board.update(checkpoint_step=7)
    assert told(story, board) == ["policy of step 7 is here"]
    board.details(download={"bytes": 1, "total_bytes": 2, "bytes_per_s": 0})
    assert told(story, board) == []
    board.update(checkpoint_step=8)
    board.details(download=None)
    assert told(story, board) == []


def test_a_wait_says_for_what_and_since_when(board):
    board.waiting("a relay")
    status = board.snapshot() | {"now_ms": 60_000 + 95_000}
    assert present(status) == "waiting for 95 s: a relay; 0 accepted, 0 pending"
    board.working("generating")
    assert present(board.snapshot()) == "working for 0 s: generating; 0 accepted, 0 pending"


def test_since_when_is_seen_on_a_narrow_terminal(board):
    board.waiting("the run's manifest; 0 of 1 bootstrap peers connected; 203.0.113.7: no answer")
    out = io.StringIO()
    TerminalLine(out, columns=lambda: 40).show(present(board.snapshot() | {"now_ms": 60_000 + 95_000}))
    assert out.getvalue() == "waiting for 95 s: the run's manifest; 0"


def test_the_line_to_join_with_is_told(board, bob):
    line = f"intellect-node --role inference --run {bob.peer_id}/demo@/dnsaddr/swarm.example"
    board.details(join=line)
    assert told(Story(), board) == [f"others join with: {line}"]


def test_a_download_says_bytes_rate_relays_and_time_left(board, alice, bob):
    now = [0.0]
    progress = DownloadProgress(board, clock=lambda: now[0])
    for at, done in ((0, 0), (1, 2_000_000), (2, 4_000_000)):
        now[0] = float(at)
        progress(done, 10_000_000, {alice.peer_id: done, bob.peer_id: 0})
    board.waiting("checkpoint 3 from the relays")
    assert present(board.snapshot()) == "downloading 40%  4.0 of 10.0 MB  2.0 MB/s  3 s left  2 relays"
    now[0] = 3.0
    progress(1_000_000, 10_000_000, {})  # another checkpoint
    assert progress_text(board.detail("download")) == "10%  1.0 of 10.0 MB  0.0 MB/s  0 relays"


def test_the_last_line_fits_and_log_lines_stand_above_it():
    out = io.StringIO()
    terminal = TerminalLine(out, columns=lambda: 40)
    terminal.show("x" * 100)
    terminal.write("a log line\n")
    terminal.show("now\x1b[2J")
    terminal.clear()
    erase = "\r\x1b[2K"
    assert out.getvalue() == "x" * 39 + erase + "a log line\n" + "now\\x1b[2J" + erase


@pytest.mark.parametrize(("tty", "term"), [(False, "xterm"), (True, "dumb"), (True, "")])
def test_without_a_terminal_nothing_is_drawn(tty, term, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: tty
    monkeypatch.setenv("TERM", term)
    assert TerminalLine.of(stream) is None


async def test_long_waits_are_logged_where_there_is_no_terminal(autojump_clock, alice, caplog):
    caplog.set_level("INFO")
    board = StatusBoard(
        role="inference", peer_id=alice.peer_id, run="r", clock=lambda: int(trio.current_time() * 1000) + 1
    )
    board.waiting("a relay")
    with trio.move_on_after(130):
        await narrate(board, None)
    lines = [record.message for record in caplog.records if record.name == "node.narrator"]
    waits = ("30 s", "60 s", "2 min")
    assert lines == [f"still waiting for {wait}: a relay; 0 accepted, 0 pending" for wait in waits]


async def test_the_line_to_join_with_is_logged_whole(autojump_clock, board, caplog, bob):
    """Peer ids in logs are cut to what people compare; this one is to be copied."""
    caplog.set_level("INFO")
    line = f"intellect-node --role inference --run {bob.peer_id}/demo@/dnsaddr/swarm.example"
    board.details(join=line)
    with trio.move_on_after(1):
        await narrate(board, None)
    (record,) = [each for each in caplog.records if each.name == "node.narrator"]
    assert f"others join with: {line}" in LineFormatter().format(record)


async def test_a_terminal_ends_with_a_clean_line(autojump_clock, board):
    out = io.StringIO()
    board.waiting("a relay")
    board.details(relays_known=1)
    with trio.move_on_after(1.2):
        await narrate(board, TerminalLine(out, columns=lambda: 80))
    assert out.getvalue().startswith(out.getvalue()[:9] + "found the run and 1 relay\n")
    assert out.getvalue().endswith("\r\x1b[2K")


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "[----]"), (0.5, "[##--]"), (1, "[####]"), (7, "[####]"), (-1, "[----]")]
)
def test_bars(share, shown):
    assert bar(share, 4) == shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 days")]
)
def test_lengths_of_time(seconds, text):
    assert span(seconds) == text
