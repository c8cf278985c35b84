"""Reading a node's log."""

import itertools

import pytest

from node.log_view import Filter, follow_log, read_log
from node.logs import BoundedLog
from protocol.errors import ConfigError, DataDirError

LINES = """\
2026-01-31T12:00:00.001Z debug node.x a=1
2026-01-31T12:00:01.001Z info node.x b=2
  a line of a traceback
2026-01-31T12:00:02.001Z warning node.x c=3
2026-01-31T12:00:03.001Z error node.x d=4 \x1b[2J
"""


@pytest.fixture
def log_dir(tmp_path):
    (tmp_path / "node.log.1").write_text("2026-01-31T11:00:00.001Z warning node.x old=1\n")
    (tmp_path / "node.log").write_text(LINES)
    return tmp_path


def names(lines):
    return [line.split("node.x ")[1].split("=")[0] for line in lines if "node.x" in line]


def test_levels_times_and_numbers(log_dir):
    assert names(read_log(log_dir, "node", Filter())) == ["old", "b", "c", "d"]
    assert names(read_log(log_dir, "node", Filter("debug"))) == ["old", "a", "b", "c", "d"]
    assert names(read_log(log_dir, "node", Filter("warning"), newest=2)) == ["c", "d"]
    since = Filter.parse(level="debug", since="2026-01-31T12:00:02+00:00")
    assert names(read_log(log_dir, "node", since)) == ["c", "d"]


def test_spans_are_counted_back_from_now():
    now = 1_769_860_800.0  # 2026-01-31T12:00:00Z
    found = [Filter.parse(level="info", since=span, now=lambda: now).since for span in ("90s", "30m", "12h", "7d")]
    assert found == ["2026-01-31T11:58:30", "2026-01-31T11:30:00", "2026-01-31T00:00:00", "2026-01-24T12:00:00"]


def test_lines_that_belong_to_one_come_with_it(log_dir):
    assert "  a line of a traceback" in read_log(log_dir, "node", Filter("info"))
    assert "  a line of a traceback" not in read_log(log_dir, "node", Filter("warning"))


def test_what_a_peer_had_logged_cannot_drive_the_terminal(log_dir):
    """Attack: an escape sequence reaches a log file through a library that writes to it."""
    assert "\\x1b[2J" in read_log(log_dir, "node", Filter("error"))[0]


@pytest.mark.parametrize("name", ["../x", "", "a/b", "A"])
def test_no_file_outside_is_read(log_dir, name):
    """Attack: a name that leads out of the directory."""
    with pytest.raises(ConfigError):
        read_log(log_dir, name, Filter())


def test_a_missing_log_says_which_there_are(log_dir):
    with pytest.raises(DataDirError) as caught:
        read_log(log_dir, "compute", Filter())
    assert "those here: node" in caught.value.hint


def test_following_goes_through_a_rotation(tmp_path, monkeypatch):
    log = BoundedLog(tmp_path / "node.log", max_bytes=100)
    log.write(b"2026-01-31T12:00:00.001Z info node.x before=1\n")
    written = (f"2026-01-31T12:00:0{number}.001Z info node.x n{number}=1\n".encode() for number in itertools.count(1))
    monkeypatch.setattr("node.log_view.time.sleep", lambda _: log.write(next(written)))
    lines = follow_log(tmp_path, "node", Filter())
    assert names(itertools.islice(lines, 4)) == ["n1", "n2", "n3", "n4"]
    lines.close()
    log.close()
