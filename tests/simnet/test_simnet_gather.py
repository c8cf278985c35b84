import json
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simnet_world import FakeCommands, peer_id

from simnet import gatherer as gatherer_module
from simnet.fleet import Fleet
from simnet.gather import SILENT_MS, Life, NodeRecord, Status
from simnet.gatherer import Gatherer, extend_timeline, note_silence, parse_status, refusals
from simnet.oracles.undisturbed import passed_step_ms


def test_a_status_keeps_what_is_known_and_ignores_the_rest():
    page = {"peer_id": "x", "pid": 1, "state": "working", "software": "y", "details": {"wait_s": 2, "new": [1]}}
    status = parse_status(json.dumps(page).encode())
    assert status is not None
    assert status.details.wait_s == 2


@pytest.mark.parametrize("page", [b"", b"[]", b"{}", b'{"pid": "x"}', b"\xff", b"[" * 100_000])
def test_a_page_of_another_form_is_no_status(page):
    assert parse_status(page) is None


@given(st.binary(max_size=200))
def test_any_bytes_give_a_status_or_none(data):
    parse_status(data)


def test_a_timeline_grows_by_what_is_new_and_stays_bounded(monkeypatch):
    monkeypatch.setattr(gatherer_module, "MAX_SEGMENTS", 3)
    timeline = [(1, "working", "a"), (2, "waiting", "b")]
    newest = [(2, "waiting", "b"), (3, "working", "c"), (4, "waiting", "d")]
    extend_timeline(timeline, newest, after=timeline[-1], since_ms=2, until_ms=5, ahead_ms=0)
    assert timeline == [(2, "waiting", "b"), (3, "working", "c"), (4, "waiting", "d")]


@pytest.mark.parametrize("ahead_ms", [0, 20_000, -20_000, 10**12])
def test_a_wrong_clock_loses_no_word_of_a_node(ahead_ms):
    """A clock is turned for ten seconds and back, whether or not that is known of it."""
    times = [10**6 + 1000 * at for at in range(40)]
    words = [(at_ms + ahead_ms * (10 <= at < 20), "working", f"task {at}") for at, at_ms in enumerate(times)]
    for known_ms in (ahead_ms, 0):
        timeline = []
        for at in range(40):
            extend_timeline(
                timeline,
                words[max(0, at - 5) : at + 1],
                after=words[at - 1] if at else None,
                since_ms=times[at] - 500,
                until_ms=times[at] + 500,
                ahead_ms=known_ms if 10 <= at < 20 else 0,
            )
        assert [what for _, _, what in timeline] == [f"task {at}" for at in range(40)]
        assert all(abs(at_ms - times[at]) <= 500 for at, (at_ms, _, _) in enumerate(timeline))


def test_words_of_a_wrong_clock_are_taken_over_by_ours(recording, tmp_path, monkeypatch):
    """Each poll brings one more; the clock is turned by an hour, back again, and at last the node is started anew."""
    fleet = Fleet(recording.scenario, tmp_path, commands=FakeCommands())
    watcher, record = Gatherer(fleet, recording), recording.nodes[0]
    member = fleet.members[record.name]
    record.lives, record.timeline = [], []
    words = []
    for at, (pid, turned_ms) in enumerate([(7, 0), (7, 3_600_000), (7, 0), (8, 0)]):
        now_ms = 1_000_000 + 1000 * at
        words = [*(words if at < 3 else []), (now_ms - 100 + turned_ms, "working", f"task {at}")]
        page = Status(peer_id="x", pid=pid, state="working", timeline=words)
        if not record.lives or record.lives[-1].pid != pid:
            record.lives.append(Life(pid, started_ms=now_ms - 900))
        monkeypatch.setattr(gatherer_module, "now_ms", lambda now_ms=now_ms: now_ms)
        watcher._note_status(member, record, page, asked_ms=now_ms)
    watcher.close()
    assert record.timeline == [
        (999_900, "working", "task 0"),
        (1_001_000, "working", "task 1"),
        (1_001_900, "working", "task 2"),
        (1_002_900, "working", "task 3"),
    ]


def test_the_begin_of_a_long_simulation_is_kept_and_when_each_step_was_seen(recording, tmp_path, monkeypatch):
    """An hour of looks, two a second, and a step every ten seconds."""
    watcher = Gatherer(Fleet(recording.scenario, tmp_path, commands=FakeCommands()), recording)
    status = recording.nodes[0].status
    recording.samples, recording.rises = [], []
    for node in recording.nodes:
        node.status.step = 0
    for at in range(7200):
        monkeypatch.setattr(gatherer_module, "now_ms", lambda at=at: 500 * at)
        status.step = at // 20
        watcher._sample()
    watcher._sample(last=True)
    watcher.close()
    times = [one.at_ms for one in recording.samples]
    gaps = [later - one for one, later in pairwise(times)]
    assert len(times) <= gatherer_module.MAX_SAMPLES + 1
    assert times[0] == 0
    assert times[-1] == 500 * 7199
    assert max(gaps[:-1]) == min(gaps[:-1]) >= gaps[-1]
    assert [passed_step_ms(recording, step) for step in (0, 100, 358, 359)] == [10_000, 1_010_000, 3_590_000, None]


def test_steps_beyond_those_that_are_noted_are_told_by_the_samples(recording, tmp_path, monkeypatch):
    """Attack: a node counts its step on at each look, to fill the recording."""
    monkeypatch.setattr(gatherer_module, "MAX_RISES", 3)
    watcher = Gatherer(Fleet(recording.scenario, tmp_path, commands=FakeCommands()), recording)
    recording.samples, recording.rises = [], []
    for at in range(1, 11):
        monkeypatch.setattr(gatherer_module, "now_ms", lambda at=at: 1000 * at)
        recording.nodes[0].status.step = 100 + at
        watcher._sample()
    watcher.close()
    assert [passed_step_ms(recording, step) for step in (100, 102, 107)] == [1000, 3000, 8000]
    assert len(recording.rises) == 3


def test_when_each_kind_of_refusal_grew_is_known():
    life = Life(1, 0)
    record = NodeRecord("inference-0", "inference", "x", lives=[life])
    for at_ms, counts in [(10, {"stale-step": 1}), (20, {"stale-step": 1, "finished": 2}), (30, {"stale-step": 2})]:
        life.refused_ms = refusals(record, counts, at_ms=at_ms)
        life.status = Status(peer_id="x", pid=1, state="working", rejected=counts)
        if at_ms == 20:
            assert life.refused_ms == {"stale-step": 10, "finished": 20}
    assert life.refused_ms == {"stale-step": 30}


def test_what_a_process_before_it_had_refused_is_no_new_refusal_of_a_process():
    """A node keeps its counts on the disk; each process shows a status before it has read them."""
    record = NodeRecord("inference-0", "inference", "x")
    said = [
        (1, 10, {}),
        (1, 20, {"stale-step": 3}),
        (2, 30, {}),
        (2, 40, {"stale-step": 3}),
        (3, 50, {"stale-step": 3}),
    ]
    for pid, at_ms, counts in [*said, (3, 60, {"stale-step": 4})]:
        if not record.lives or record.lives[-1].pid != pid:
            record.lives.append(Life(pid, at_ms))
        record.lives[-1].refused_ms = refusals(record, counts, at_ms=at_ms)
        record.lives[-1].status = Status(peer_id="x", pid=pid, state="working", rejected=counts)
    assert [life.refused_ms for life in record.lives] == [{"stale-step": 20}, {}, {"stale-step": 60}]


def test_a_silence_lasts_from_the_last_answer_to_the_last_question():
    life = Life(1, started_ms=1000)
    note_silence(life, since_ms=0, until_ms=1000 + SILENT_MS - 1)
    assert life.silences == []
    note_silence(life, since_ms=0, until_ms=1000 + SILENT_MS)
    note_silence(life, since_ms=0, until_ms=50_000)
    life.status_at_ms = 60_000
    note_silence(life, since_ms=0, until_ms=75_000)
    assert life.silences == [(1000, 50_000), (60_000, 75_000)]


def test_nobody_is_silent_while_the_simulation_itself_stood_still(recording, tmp_path, monkeypatch):
    watcher = Gatherer(Fleet(recording.scenario, tmp_path, commands=FakeCommands()), recording)
    found = []
    for at_ms in (1_000_000, 1_020_000, 2_000_000, 2_001_000):
        monkeypatch.setattr(gatherer_module, "now_ms", lambda at_ms=at_ms: at_ms)
        watcher.poll()
        found.append(watcher._looking_since_ms)
    watcher.close()
    assert found == [1_000_000, 1_000_000, 2_000_000, 2_000_000]


def test_silences_are_bounded(monkeypatch):
    """Attack: a node answers now and then, to fill the recording."""
    monkeypatch.setattr(gatherer_module, "MAX_SILENCES", 3)
    life = Life(1, started_ms=0)
    for number in range(10):
        life.status_at_ms = 100_000 * number
        note_silence(life, since_ms=0, until_ms=100_000 * number + 20_000)
    assert len(life.silences) == 3


def test_of_too_many_silences_the_longest_and_the_newest_are_kept(monkeypatch):
    """Attack: a node is silent now and then, and hangs for good when no more silences are kept."""
    monkeypatch.setattr(gatherer_module, "MAX_SILENCES", 3)
    life = Life(1, started_ms=0)
    for number, silent_ms in enumerate((20_000, 40_000, 12_000, 30_000, 11_000)):
        life.status_at_ms = 100_000 * number
        for until_ms in range(10_000, silent_ms + 1, 1000):
            note_silence(life, since_ms=0, until_ms=life.status_at_ms + until_ms)
    assert life.silences == [(100_000, 140_000), (300_000, 330_000), (400_000, 411_000)]
    life.status_at_ms = 500_000
    for until_ms in range(510_000, 1_400_001, 1000):
        note_silence(life, since_ms=0, until_ms=until_ms)
    assert life.silences == [(100_000, 140_000), (300_000, 330_000), (500_000, 1_400_000)]


class Endless(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 65536)
        except OSError:
            return

    def log_message(self, *_):
        return


def test_an_endless_status_is_given_up():
    """Attack: a node answers its status page without end, to fill the simulation's memory."""
    server = HTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(ValueError, match="too large or comes too slowly"):
            gatherer_module._fetch(f"http://127.0.0.1:{server.server_port}/status", nullcontext)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("url", ["http://example.org/status", "file:///etc/passwd", "https://127.0.0.1/status", ""])
def test_only_loopback_pages_are_read(url: str):
    """Attack: a node writes another address to its status.url, to have the simulation ask there."""
    with pytest.raises(ValueError, match="not a loopback"):
        gatherer_module._fetch(url, nullcontext)


def test_a_final_status_that_is_too_large_is_left_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gatherer_module, "MAX_STATUS_BYTES", 10)
    path = tmp_path / "status-final.json"
    path.write_text(json.dumps({"peer_id": peer_id("a"), "pid": 1, "state": "finished"}))
    assert gatherer_module._read_final(path) is None


def test_verdicts_against_a_node_are_kept_when_the_trainer_has_forgotten_them(recording, tmp_path):
    fleet = Fleet(recording.scenario, tmp_path, commands=FakeCommands())
    recording.against = []
    gatherer = Gatherer(fleet, recording)
    gatherer.poll()
    del recording.trainer.verdicts[:]
    gatherer.poll()
    gatherer.close()
    assert [verdict.submission for verdict in recording.against] == ["cd" * 32]


def test_whether_the_machine_tells_waits_for_a_core_is_recorded(recording, tmp_path, monkeypatch):
    """Once it did: the first look may be before any thread had to wait."""
    found = []
    for waited_s in (0.0, 0.2, 0.0):
        monkeypatch.setattr(gatherer_module, "core_wait_s", lambda waited_s=waited_s: waited_s)
        gatherer = Gatherer(Fleet(recording.scenario, tmp_path / str(len(found)), commands=FakeCommands()), recording)
        gatherer.poll()
        gatherer.close()
        found.append(recording.core_waits_known)
    assert found == [False, True, True]


def test_counts_are_the_ledgers(recording):
    assert (recording.accepted, recording.rejected) == (40, {"toploc: exponent mismatches": 2})
    assert recording.step == 20
