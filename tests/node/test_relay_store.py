"""What a relay keeps, across crashes and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from disk_kit import full_disk
from factories import make_admission, make_verdict, sealed
from relay_world import submission_of
from sqlite_kit import counted

from node.relay.store import RelayStore, Upload
from protocol.envelope import Signed
from protocol.errors import ChecksumError, DataDirError, RefusedError
from protocol.identity import Identity
from protocol.records import Submission

CONTENT = b"rollouts" * 100


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RelayStore]:
    store = RelayStore(tmp_path, max_bytes=1 << 20)
    yield store
    store.close()


@pytest.fixture
def alice() -> Identity:
    return Identity.from_phrase("alice")


@pytest.fixture
def bob() -> Identity:
    return Identity.from_phrase("bob")


def keep(store: RelayStore, submission: Signed[Submission], content: bytes = CONTENT, receipt: bytes = b"r") -> bytes:
    with store.upload(submission) as upload:
        upload.write(content)
        return upload.keep(lambda: receipt)


def files_under(directory: Path) -> list[str]:
    return sorted(path.parent.name for path in directory.rglob("*") if path.is_file() and "sqlite" not in path.name)


def content_of(store: RelayStore, submission: Signed[Submission]) -> bytes:
    with store.open_file(submission.id) as file:
        return file.read()


def test_restart_keeps_everything(tmp_path: Path, alice: Identity) -> None:
    submission = submission_of(alice, CONTENT)
    first = RelayStore(tmp_path, max_bytes=1 << 20)
    keep(first, submission)
    first.add_verdict(make_verdict(submission))
    first.set_document("head", b"a head")
    before = first.feed(0, kinds=["submission", "verdict"]), first.stats()
    first.close()
    again = RelayStore(tmp_path, max_bytes=1 << 20)
    assert (again.feed(0, kinds=["submission", "verdict"]), again.stats()) == before
    assert again.document("head") == b"a head"
    assert again.receipt(submission.id) == b"r"
    assert content_of(again, submission) == CONTENT
    again.close()


def test_wrong_bytes_leave_nothing_behind(store: RelayStore, tmp_path: Path, alice: Identity) -> None:
    """A file is swapped for another of the same size after its record was signed."""
    with pytest.raises(ChecksumError):
        keep(store, submission_of(alice, CONTENT), CONTENT[::-1])
    assert files_under(tmp_path) == []
    assert store.feed(0, kinds=["submission"]) == []
    assert store.stats().file_bytes == 0


def test_short_file_is_refused(store: RelayStore, alice: Identity) -> None:
    with pytest.raises(ChecksumError):
        keep(store, submission_of(alice, CONTENT), CONTENT[:-1])


def test_body_longer_than_its_record_is_cut_off(store: RelayStore, alice: Identity) -> None:
    """Filling the disk: a small record, an endless body."""
    with pytest.raises(RefusedError, match="longer"):
        keep(store, submission_of(alice, CONTENT), CONTENT + b"x")


def test_same_submission_in_parallel_gets_one_receipt(store: RelayStore, tmp_path: Path, alice: Identity) -> None:
    submission = submission_of(alice, CONTENT)
    with store.upload(submission) as first, store.upload(submission) as second:
        first.write(CONTENT)
        second.write(CONTENT)
        assert [first.keep(lambda: b"one"), second.keep(lambda: b"two")] == [b"one", b"one"]
    assert files_under(tmp_path) == ["submissions"]
    assert content_of(store, submission) == CONTENT
    assert len(store.feed(0, kinds=["submission"])) == 1


def test_two_submissions_race_for_one_index(store: RelayStore, tmp_path: Path, alice: Identity) -> None:
    """Cherry-picking: two different files for one index, sent at the same moment."""
    submission, rival = submission_of(alice, CONTENT), submission_of(alice, CONTENT[::-1])
    with store.upload(submission) as first, store.upload(rival) as second:
        first.write(CONTENT)
        second.write(CONTENT[::-1])
        first.keep(lambda: b"one")
        with pytest.raises(RefusedError) as caught:
            second.keep(lambda: b"two")
    assert caught.value.code == "duplicate-index"
    assert files_under(tmp_path) == ["submissions"]


def test_quota_counts_what_is_under_way(store: RelayStore, alice: Identity) -> None:
    """Many uploads at once, each of which would fit alone."""
    big = [submission_of(alice, CONTENT, index=index, size=400_000) for index in range(3)]
    with store.upload(big[0]), store.upload(big[1]):
        with pytest.raises(RefusedError) as caught, store.upload(big[2]):
            pass
        assert caught.value.code == "disk-full"
    with store.upload(big[2]):
        pass


def test_crash_leaves_only_what_opening_sweeps(tmp_path: Path, alice: Identity, bob: Identity) -> None:
    """Power cuts: in an upload, between file and row, and in a prune."""
    store = RelayStore(tmp_path, max_bytes=1 << 20)
    kept, lost = submission_of(alice, CONTENT), submission_of(bob, CONTENT)
    keep(store, kept)
    keep(store, lost)
    store.close()
    (tmp_path / "incoming" / "half").write_bytes(b"half")
    (tmp_path / "submissions" / ("0" * 64)).write_bytes(b"no row")
    (tmp_path / "submissions" / lost.id.hex()).unlink()
    again = RelayStore(tmp_path, max_bytes=1 << 20)
    assert files_under(tmp_path) == ["submissions"]
    assert content_of(again, kept) == CONTENT
    with pytest.raises(RefusedError) as caught:
        again.open_file(lost.id)
    assert caught.value.code == "not-found"
    assert again.receipt(lost.id) == b"r"
    assert again.stats().file_bytes == len(CONTENT)
    again.close()


def test_pruning_deletes_files_and_keeps_records(store: RelayStore, alice: Identity) -> None:
    old, new = submission_of(alice, CONTENT, step=3), submission_of(alice, CONTENT, step=4)
    keep(store, old)
    keep(store, new)
    assert store.prune(4) == 1
    with pytest.raises(RefusedError):
        store.open_file(old.id)
    assert content_of(store, new) == CONTENT
    assert len(store.feed(0, kinds=["submission"])) == 2
    assert store.stats().file_bytes == len(CONTENT)


def test_feed_pages_and_filters(store: RelayStore, alice: Identity, bob: Identity) -> None:
    submissions = [submission_of(who, CONTENT, index=index) for index in range(2) for who in (alice, bob)]
    for submission in submissions:
        keep(store, submission)
        store.add_verdict(make_verdict(submission))
    kinds = ["submission", "verdict"]
    everything = store.feed(0, kinds=kinds)
    assert [row.seq for row in everything] == list(range(1, 9))
    pages = [store.feed(after, kinds=kinds, limit=3) for after in (0, 3, 6)]
    assert [row for page in pages for row in page] == everything
    assert {row.kind for row in store.feed(0, kinds=["verdict"])} == {"verdict"}
    assert [row.seq for row in store.feed(0, kinds=kinds, about=bob.peer_id.public_key)] == [3, 4, 7, 8]


def test_first_verdict_of_a_validator_counts(store: RelayStore, alice: Identity) -> None:
    submission = submission_of(alice, CONTENT)
    verdict = make_verdict(submission)
    store.add_verdict(verdict)
    store.add_verdict(verdict)
    with pytest.raises(RefusedError) as caught:
        store.add_verdict(make_verdict(submission, outcome="reject"))
    assert caught.value.code == "already-judged"
    assert store.stats().verdicts == 1


def test_verdicts_about_nothing_take_the_place_of_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alice: Identity, bob: Identity
) -> None:
    """A validator signs verdicts about submissions and appeals that do not exist, until a relay's disk is full."""
    monkeypatch.setattr("node.relay.loose.MAX_LOOSE_EACH", 8)
    monkeypatch.setattr("node.relay.loose.LEFT", 7)
    store = RelayStore(tmp_path, max_bytes=1 << 20)
    work = submission_of(alice, CONTENT)
    keep(store, work)
    elsewhere = [submission_of(bob, CONTENT, index=index) for index in range(2)]
    here, others, in_ledger = (
        make_verdict(work, by=bob),
        make_verdict(elsewhere[0], by=alice),
        make_verdict(elsewhere[1], by=bob),
    )
    for verdict in (here, others, in_ledger):
        store.add_verdict(verdict)
    lies = [sealed(msgspec.structs.replace(here.record, appeal=bytes([n]) * 32), bob) for n in range(1, 30)]
    for place, lie in enumerate(lies):
        store.add_verdict(lie, known=in_ledger.record.submission.__eq__)
        if place == 15:
            store.close()
            store = RelayStore(tmp_path, max_bytes=1 << 20)
    assert all(store.has(verdict.id) for verdict in (here, others, in_ledger, *lies[-7:]))
    assert store.stats().verdicts <= 3 + 8
    assert len(store.feed(0, kinds=["verdict"])) == store.stats().verdicts
    store.close()


def test_an_admission_is_as_quickly_taken_however_many_came_before(tmp_path: Path) -> None:
    store, looked = RelayStore(tmp_path, max_bytes=1 << 24), []
    store._db.execute("PRAGMA synchronous=OFF")
    for number in range(240):
        with counted(store._db) as steps:
            store.add_petition(make_admission(Identity.from_phrase(f"contributor {number}"), b"r" * 32), subject=b"")
        looked.append(steps.taken)
    store.close()
    assert sum(looked[-20:]) < 1.3 * sum(looked[:20])


def test_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "relay.sqlite").write_bytes(b"not a database, but long enough to be read as one" * 50)
    with pytest.raises(DataDirError, match=r"cannot use the relay's store"):
        RelayStore(tmp_path, max_bytes=1)


def test_upload_that_ends_early_frees_its_room(store: RelayStore, tmp_path: Path, alice: Identity) -> None:
    def broken(upload: Upload) -> None:
        upload.write(CONTENT[:10])
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError), store.upload(submission_of(alice, CONTENT, size=900_000)) as upload:
        broken(upload)
    assert files_under(tmp_path) == []
    with store.upload(submission_of(alice, CONTENT, size=900_000)):
        pass


def test_who_waits_for_one_contributor_is_told_from_memory(
    store: RelayStore, tmp_path: Path, alice: Identity, bob: Identity
) -> None:
    """A look at the disk for each of a thousand waiting polls at every submission of anybody would add up."""
    assert (store.newest(), store.newest(alice.peer_id.public_key)) == (0, 0)
    keep(store, submission_of(alice, CONTENT))
    keep(store, submission_of(bob, CONTENT))
    assert (store.newest(), store.newest(alice.peer_id.public_key)) == (2, 1)
    store.add_verdict(make_verdict(submission_of(alice, CONTENT)))
    assert (store.newest(alice.peer_id.public_key), store.newest(bob.peer_id.public_key)) == (3, 2)
    again = RelayStore(tmp_path / "again", max_bytes=1 << 30)
    assert again.newest(alice.peer_id.public_key) == 0
    again.close()


def test_a_file_whose_record_the_disk_does_not_take_is_not_kept_either(
    store: RelayStore, tmp_path: Path, alice: Identity
) -> None:
    """It would be counted, served and pruned by nobody until a restart."""
    submission = submission_of(alice, CONTENT)
    with store.upload(submission) as upload:
        upload.write(CONTENT)
        with pytest.raises(DataDirError), full_disk(room=len(CONTENT)):
            upload.keep(lambda: b"r")
    assert files_under(tmp_path) == []
    assert keep(store, submission) == b"r"
    assert content_of(store, submission) == CONTENT


def test_no_receipt_is_given_for_a_file_that_went_with_another_upload_of_the_same(
    store: RelayStore, tmp_path: Path, alice: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two at once the disk takes the record of neither: one fails after the other has named its file."""
    submission = submission_of(alice, CONTENT)

    def fails() -> bytes:
        raise DataDirError("no space is left")

    def meanwhile(directory: Path) -> None:
        monkeypatch.undo()
        with pytest.raises(DataDirError):
            first.keep(fails)

    with store.upload(submission) as first, store.upload(submission) as second:
        for upload in (first, second):
            upload.write(CONTENT)
        monkeypatch.setattr("node.relay.store.sync_directory", meanwhile)
        with pytest.raises(RefusedError) as caught:
            second.keep(lambda: b"r")
    assert caught.value.code == "disk-full"
    assert store.receipt(submission.id) is None
    assert keep(store, submission) == b"r"
    assert content_of(store, submission) == CONTENT


def test_files_that_were_half_pruned_are_pruned_later_and_counted_until_then(
    store: RelayStore, tmp_path: Path, alice: Identity
) -> None:
    """The disk takes the first few changes: some records would say that their file is gone, and the quota would not."""
    for index in range(32):
        keep(store, submission_of(alice, CONTENT, index=index))
    log = (tmp_path / "relay.sqlite-wal").stat().st_size
    with pytest.raises(DataDirError), full_disk(room=log + 4 * 4120):
        store.prune(9)
    assert store.stats().file_bytes == 32 * len(CONTENT)
    assert store.prune(9) == 32
    assert store.stats().file_bytes == 0
