"""A node's memory of its ledger on the disk: every state, row and verdict is as it is in plain dicts."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from bench.synthetic_ledger import entries, manifest
from node.dashboard.world import find_submission, submission_rows
from node.ledger.memory import live_ledger, looked_at, newest, node_memory
from node.ledger.rows import leaderboard, submissions_of
from node.ledger.scratch import Scratch, ScratchMap, ScratchSet, ScratchTips
from node.relay.standing import standing_of
from protocol.errors import DataDirError, LedgerError
from protocol.ledger import LedgerState

ENTRIES = 1500
HOT = 3
AT_ONCE = 4


@pytest.fixture(scope="module")
def ledger() -> list[bytes]:
    return list(islice(entries(ENTRIES), ENTRIES))


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    found = Scratch(tmp_path, at_once=AT_ONCE)
    yield found
    found.close()


def plain_state() -> LedgerState:
    run = manifest()
    return LedgerState(run.id, run.record, signatures_checked=True)


@contextmanager
def on_disk(directory: Path) -> Iterator[LedgerState]:
    """A state of which almost nothing is in memory."""
    run = manifest()
    scratch, memory = node_memory(directory, hot=HOT, at_once=AT_ONCE)
    with closing(scratch):
        yield LedgerState(run.id, run.record, memory=memory, signatures_checked=True)


def test_replay_gives_the_same_state(ledger, tmp_path):
    plain = plain_state()
    with on_disk(tmp_path) as state:
        for data in ledger:
            plain.apply(data)
            state.apply(data)
            assert list(state.unaccepted) == list(plain.unaccepted)
        assert state.length == ENTRIES
        assert [state.tip_at(at) for at in range(ENTRIES + 2)] == [plain.tip_at(at) for at in range(ENTRIES + 2)]
        assert list(submissions_of(state)) == list(submissions_of(plain))
        assert list(state.batches.items()) == list(plain.batches.items())
        assert leaderboard(state) == leaderboard(plain)
        assert submission_rows(state) == submission_rows(plain)
        assert [newest(state.submissions, count) for count in (1, 9, 10**6)] == [
            newest(plain.submissions, count) for count in (1, 9, 10**6)
        ]
        assert any(one.used_in is not None for one in state.submissions.values())
        for key in plain.submissions:
            assert find_submission(state, key) == find_submission(plain, key)
        assert state.shelf.stale(10**6) == plain.shelf.stale(10**6)
        for data in ledger[:50]:
            assert rule_of(state, data) == rule_of(plain, data)


def rule_of(state: LedgerState, data: bytes) -> str:
    """By which rule an entry is refused that is there already."""
    with pytest.raises(LedgerError) as caught:
        state.apply(data)
    return str(caught.value.rule)


def test_those_that_are_not_accepted_are_known_without_a_walk(ledger):
    plain = plain_state()
    for data in ledger:
        plain.apply(data)
    assert list(plain.unaccepted) == [key for key, one in plain.submissions.items() if one.state != "accepted"]
    assert 0 < len(plain.unaccepted) < len(plain.submissions)


def test_only_the_newest_are_in_memory(ledger, tmp_path):
    """However long the run is: what nobody looked at lately lies on the disk."""
    most_of_a_batch = 32
    with on_disk(tmp_path) as state:
        for number, data in enumerate(ledger):
            state.apply(data)
            if number % 100 == 0 and number:
                assert HOT <= objects(state.submissions) <= most_of_a_batch + HOT + AT_ONCE
        assert len(state.submissions) > 10 * most_of_a_batch


def test_a_change_of_what_was_looked_up_stays(scratch):
    numbers = numbers_in(scratch)
    for key in range(3 * AT_ONCE):
        numbers[key] = [key]
        scratch.settle()
    assert numbers.look(0) is not numbers.look(0), "it is on the disk"
    numbers[0].append(7)
    for key in range(100, 100 + 3 * AT_ONCE):
        numbers[key] = [key]
        scratch.settle()
    assert numbers.look(0) is not numbers.look(0)
    assert numbers[0] == [0, 7]
    del numbers[0]
    assert 0 not in numbers
    with pytest.raises(KeyError):
        numbers[0]
    assert list(numbers) == [*range(1, 3 * AT_ONCE), *range(100, 100 + 3 * AT_ONCE)]


def test_nothing_is_written_while_it_may_be_changed(scratch):
    """Other threads look things up while an entry is taken in: only between two entries may an object go."""
    numbers = numbers_in(scratch)
    for key in range(100):
        numbers[key] = [key]
    first = numbers[0]
    for key in range(100):
        numbers[key]
    first.append(1)
    for _ in range(100):
        scratch.settle()
    assert numbers.look(0) == [0, 1]


def test_a_walk_goes_on_while_others_write(scratch, monkeypatch):
    monkeypatch.setattr("node.ledger.scratch.ROWS_AT_ONCE", 2)
    numbers = numbers_in(scratch)
    for key in range(30):
        numbers[key] = [key]
        scratch.settle()
    walk = numbers.items().__iter__()
    seen = [next(walk) for _ in range(5)]
    for key in range(30, 60):
        numbers[key] = [key]
        scratch.settle()
    seen += list(walk)
    assert seen[:30] == [(key, [key]) for key in range(30)]
    assert len({key for key, _ in seen}) == len(seen)


def test_what_a_full_disk_does_not_take_stays_in_memory(ledger, tmp_path, caplog):
    """The replay goes on, and is the same; once there is room, it is written."""
    plain = plain_state()
    with on_disk(tmp_path) as state:
        numbers = state.submissions
        pages = numbers._db.execute("PRAGMA page_count").fetchone()[0]
        numbers._db.execute(f"PRAGMA max_page_count={pages}")  # from here on SQLite says that the disk is full
        for data in ledger[:1000]:
            plain.apply(data)
            state.apply(data)
        assert len(numbers) - 3 * AT_ONCE < objects(numbers) > 10 * (HOT + AT_ONCE)
        assert "the disk takes no more" in caplog.text
        numbers._db.execute("PRAGMA max_page_count=1000000")
        for data in ledger[1000:]:
            plain.apply(data)
            state.apply(data)
        assert objects(numbers) < len(numbers) // 2
        assert list(submissions_of(state)) == list(submissions_of(plain))
        assert caplog.text.count("the disk takes no more") <= 4


def test_a_file_that_may_not_grow_is_read_all_the_same(ledger, tmp_path):
    """The limit on files' sizes that a system or a user has set: every write fails, of what was there as well."""
    plain, limits = plain_state(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with on_disk(tmp_path) as state:
        for number, data in enumerate(ledger):
            if number == 500:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            try:
                plain.apply(data)
                state.apply(data)
            finally:
                if number == 1000:
                    known = [state.submissions.look(key) for key in plain.submissions]
                    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(known) > 200
        assert list(submissions_of(state)) == list(submissions_of(plain))
        assert objects(state.submissions) < len(state.submissions) // 2


class HalfWritten:
    """A connection of which a write fails when half of its rows are in."""

    def __init__(self, connection) -> None:
        self.connection, self.failing = connection, True

    def execute(self, *arguments):
        return self.connection.execute(*arguments)

    def executemany(self, statement, rows):
        if not self.failing:
            return self.connection.executemany(statement, rows)
        self.connection.executemany(statement, rows[: len(rows) // 2])
        raise sqlite3.OperationalError("database or disk is full")


def test_half_a_write_is_none(scratch):
    numbers, digests = numbers_in(scratch), ScratchSet(scratch, "digests")
    numbers._db, digests._db = HalfWritten(scratch.db), HalfWritten(scratch.db)
    for key in range(600):
        numbers[key] = [key]
        digests.add(key.to_bytes(32))
        scratch.settle()
        numbers._db.failing = digests._db.failing = key < 100
    assert dict(numbers.items()) == {key: [key] for key in range(600)}
    assert all(key.to_bytes(32) in digests for key in range(600))
    assert (600).to_bytes(32) not in digests
    assert objects(numbers) < 600
    assert len(digests._hot) < 600


def test_a_walk_tells_of_changes_that_are_not_written(scratch):
    numbers = numbers_in(scratch)
    for key in range(100):
        numbers[key] = [key]
        scratch.settle()
    numbers[0].append(7)
    assert next(iter(numbers.values())) == [0, 7]


def test_what_is_looked_up_all_the_time_stays(scratch):
    numbers = numbers_in(scratch)
    for key in range(100):
        numbers[key] = [key]
        numbers[0]
        scratch.settle()
    assert numbers.look(0) is numbers.look(0)
    assert numbers.look(1) is not numbers.look(1)


def test_a_disk_that_takes_nothing_is_named(tmp_path):
    with pytest.raises(DataDirError, match=r"scratch\.sqlite"):
        node_memory(tmp_path / "nowhere")


def test_a_file_that_cannot_be_read_any_more_is_named(scratch, tmp_path):
    numbers = numbers_in(scratch)
    for key in range(100):
        numbers[key] = [key]
        scratch.settle()
    scratch.db.execute("DROP TABLE numbers")
    for ask in (lambda: numbers[0], lambda: numbers.look(0), lambda: 0 in numbers, lambda: list(numbers)):
        with pytest.raises(DataDirError, match="replay"):
            ask()


def test_an_entry_that_is_being_applied_meets_no_fault(scratch, monkeypatch):
    """What is added at its end is in memory; whoever reads hears that the file is damaged."""
    monkeypatch.setattr("node.ledger.scratch.TIPS_AT_ONCE", 2)
    digests, tips = ScratchSet(scratch, "digests"), ScratchTips(scratch, "tips")
    added = [number.to_bytes(32) for number in range(100)]

    @contextmanager
    def damaged() -> Iterator[None]:
        raise DataDirError("cannot read what the replay of the ledger remembers")
        yield

    monkeypatch.setattr(scratch, "writing", damaged)
    for one in added:
        digests.add(one)
        tips.add(one)
    assert [tips[at] for at in range(100)] == added
    assert all(one in digests for one in added)


def test_what_an_earlier_process_left_is_no_part_of_the_replay(ledger, tmp_path):
    for _ in range(2):
        with on_disk(tmp_path) as state:
            assert len(state.submissions) == 0
            for data in ledger[:300]:
                state.apply(data)


def test_answers_to_others_leave_no_objects_behind(ledger, tmp_path):
    """A contributor asks where each of its old submissions stands; somebody opens each of them in the dashboard."""
    with on_disk(tmp_path) as state:
        for data in ledger:
            state.apply(data)
        answer_everything(state)


def answer_everything(state):
    before = objects(state.submissions)
    keys = list(state.submissions)
    for key in keys:
        author = looked_at(state.submissions, key).author
        assert [row.submission for row in standing_of(state, author, [key]).submissions] == [key]
        assert find_submission(state, key) is not None
    submission_rows(state)
    assert objects(state.submissions) == before < len(keys)
    assert looked_at(state.submissions, b"n" * 32) is None


def objects(submissions):
    """How many of these are in memory."""
    return sum(one is submissions.look(key) for key, one in submissions.items())


def numbers_in(scratch: Scratch) -> ScratchMap[int, list[int]]:
    return ScratchMap(scratch, "numbers", msgspec.msgpack.encode, msgspec.msgpack.decode, hot=HOT)


def test_nodes_keep_it_so(tmp_path):
    log = live_ledger(tmp_path / "ledger", manifest())
    with closing(log):
        assert isinstance(log.state.submissions, ScratchMap)
        assert (tmp_path / "replay" / "scratch.sqlite").exists()
