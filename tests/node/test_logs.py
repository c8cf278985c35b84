"""Log lines: one each, bounded, with short peer ids."""

import io
import json
import logging
import re
from contextlib import closing
from functools import partial

import pytest

from node.logs import MAX_LINE_CHARS, BoundedLog, keep_log, set_up_logging, shorten_peer_ids
from protocol.identity import Identity


@pytest.fixture
def lines():
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield lambda name="info": (set_up_logging(name, stream=stream), stream)[1]
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_peer_cannot_forge_a_line(lines):
    """Attack: a name with a line break and terminal codes, to fake or hide log entries."""
    stream = lines()
    logging.getLogger("node.x").info("relay name=%s", "a\n2025 error forged\x1b[2J")
    assert stream.getvalue().count("\n") == 1
    assert "\\n2025 error forged\\x1b" in stream.getvalue()


def test_long_lines_are_cut(lines):
    stream = lines()
    logging.getLogger("node.x").info("y" * 100_000)
    assert len(stream.getvalue()) == MAX_LINE_CHARS + 1


def test_peer_ids_are_short():
    alice = Identity.from_phrase("alice").peer_id
    assert shorten_peer_ids(f"from {alice}, {alice}") == f"from {alice.short}, {alice.short}"


def test_libraries_are_quiet(lines):
    stream = lines()
    logging.getLogger("libp2p.kad_dht").warning("flood")
    logging.getLogger("node").info("ours")
    logging.getLogger("node").debug("hidden")
    assert "flood" not in stream.getvalue()
    assert "hidden" not in stream.getvalue()
    assert "ours" in stream.getvalue()


def test_tracebacks_show_at_debug_only(lines):
    for level, shown in (("info", False), ("debug", True)):
        stream = lines(level)
        stream.truncate(0)
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("node").exception("failed")
        assert "ValueError('boom')" in stream.getvalue()
        assert ("Traceback" in stream.getvalue()) is shown


def test_a_full_disk_does_not_raise(tmp_path, monkeypatch, caplog):
    log = BoundedLog(tmp_path / "x.log", max_bytes=10)

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "_rotate", full)
    log.write(b"x" * 100)
    log.write(b"x" * 100)
    log.close()
    assert caplog.text.count("cannot be written") == 1


def test_a_full_disk_is_told_once_where_the_log_is_that_file(tmp_path, monkeypatch, lines):
    """What says so comes to the same file, which cannot take it either; once there was room it is told again."""
    root, stream = logging.getLogger(), lines()
    full, real = [True], BoundedLog._rotate

    def rotate(log):
        if full[0]:
            raise OSError(28, "No space left on device")
        real(log)

    monkeypatch.setattr(BoundedLog, "_rotate", rotate)
    monkeypatch.setattr("node.logs.BoundedLog", partial(BoundedLog, max_bytes=10))
    with closing(keep_log(tmp_path / "node.log")):
        for told in (1, 2):
            full[0] = True
            for number in range(5):
                root.info("line %d", number)
            assert stream.getvalue().count("log file cannot be written") == told
            assert stream.getvalue().count("line 4") == told
            full[0] = False
            root.info("there is room")


def test_a_log_that_somebody_deletes_is_begun_anew(tmp_path):
    """To make room on a full disk."""
    with closing(BoundedLog(tmp_path / "x.log", max_bytes=10)) as log:
        log.write(b"12345")
        log.path.unlink()
        for text in (b"67890", b"abcde", b"fghij"):
            log.write(text)
        assert log.path.read_bytes() == b"abcdefghij"


def test_a_log_that_cannot_be_rotated_goes_on_when_it_can(tmp_path, monkeypatch, caplog):
    """Once its name cannot be changed, once the new file cannot be opened."""
    log, aside = BoundedLog(tmp_path / "x.log", max_bytes=10), tmp_path / "x.log.1"
    with closing(log):
        log.write(b"0123456789")
        aside.mkdir()
        for _ in range(3):
            log.write(b"lost")
        aside.rmdir()
        with monkeypatch.context() as disk:
            disk.setattr("pathlib.Path.open", no_inodes)
            for _ in range(3):
                log.write(b"lost")
        log.write(b"there is room"[:10])
        assert (aside.read_bytes(), log.path.read_bytes()) == (b"0123456789", b"there is r")
    assert caplog.text.count("cannot be written") == 1


def no_inodes(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.fixture
def json_lines():
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    set_up_logging("info", stream=stream, log_format="json")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_json_line_is_one_object(json_lines):
    alice = Identity.from_phrase("alice").peer_id
    logging.getLogger("node.x").warning('relay=%s name="%s"', alice, "a\n{forged}\x1b[2J")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("node.y").exception("failed")
    first, second = json_lines()
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "node.x",
        "message": f'relay={alice.short} name="a\n{{forged}}\x1b[2J"',
    }
    assert (second["message"], second["error"]) == ("failed", "ValueError('boom')")
    assert second["at"].startswith("test_logs.py:")


def test_an_error_says_where_it_was_raised_also_out_of_a_group(lines):
    def inner():
        raise OSError(28, "No space left on device")

    stream = lines("info")
    try:
        try:
            inner()
        except OSError as error:
            raise ExceptionGroup("of a nursery", [ExceptionGroup("of another", [error])]) from None
    except ExceptionGroup:
        logging.getLogger("node").exception("failed")
    assert re.search(r" at=test_logs\.py:\d+\(inner\) < test_logs\.py:\d+\(test_an_error", stream.getvalue())


@pytest.mark.parametrize("char", ["y", "\x00", "é", "😀"])
def test_json_lines_are_cut_and_stay_whole_objects(json_lines, char):
    """Attack: characters that become six when they are escaped."""
    logging.getLogger("node.x").info(char * 100_000)
    (line,) = json_lines()
    assert line["message"].endswith("…")
    assert len(json.dumps(line)) <= MAX_LINE_CHARS
