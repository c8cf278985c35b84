"""The ledger on disk: what was appended is there after any crash, and damage is named."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from disk_kit import full_disk
from factories import make_admission, make_batch, make_manifest, make_submission, make_trained, make_verdict
from sqlite_kit import counted

from node.ledger.index import LedgerIndex, Row
from node.ledger.log import LedgerLog
from node.ledger.segments import read_segments
from protocol.errors import DataDirError, LedgerError, ProtocolError
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.ledger_memory import LedgerMemory
from protocol.records import AdmissionSpec
from protocol.segments import segment_hash, split_segment

RUN = b"r" * 32
MANIFEST = make_manifest(rollout=msgspec.structs.replace(make_manifest().rollout, max_submissions_per_step=9))
SMALL = 2000
"""A segment takes four of the entries below, or a little more."""


@contextmanager
def opened(path: Path, *, mends: bool = False) -> Iterator[LedgerLog]:
    ledger = LedgerLog(path, LedgerState(RUN, MANIFEST), mends=mends, segment_bytes=SMALL)
    try:
        yield ledger
    finally:
        ledger.close()


@pytest.fixture
def entries() -> list[bytes]:
    alice = Identity.from_phrase("alice")
    submissions = [make_submission(alice, RUN, index=index) for index in range(9)]
    return [data for one in submissions for data in (one.data, make_verdict(one).data)]


@pytest.fixture
def filled(tmp_path: Path, entries: list[bytes]) -> Path:
    """Four full segments and an open one of two entries."""
    with opened(tmp_path / "ledger") as ledger:
        ledger.append(entries)
        assert (len(ledger.segments()), ledger.segments()[-1].end) == (4, 16)
    return tmp_path / "ledger"


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("segment-*"))


def test_reopened_ledger_has_the_same_state(filled: Path, entries: list[bytes]) -> None:
    with opened(filled) as again:
        assert (again.state.length, again.entries(1, 5), again.entries(17, 9)) == (18, entries[1:6], entries[17:])
        tip = RUN
        for entry in entries:
            tip = next_tip(tip, open_entry(entry).id)
        assert again.state.tip == tip
        assert again.ids(3, 5) == [open_entry(entry).id for entry in entries[3:5]]


def test_segments_are_cut_alike_however_entries_come(tmp_path: Path, filled: Path, entries: list[bytes]) -> None:
    with opened(tmp_path / "other") as other, opened(filled) as ledger:
        for entry in entries:
            other.append([entry])
        assert other.segments() == ledger.segments()


def test_segment_hash_covers_its_bytes_and_the_one_before(filled: Path, entries: list[bytes]) -> None:
    previous, taken = RUN, []
    with opened(filled) as ledger:
        for info in ledger.segments():
            with ledger.open_segment(info.sha256) as file:
                data = file.read()
            assert (segment_hash(previous, data), len(data)) == (info.sha256, info.size)
            previous, taken = info.sha256, [*taken, *split_segment(data)]
        assert ledger.open_segment(b"x" * 32) is None
    assert taken == entries[:16]


@pytest.mark.parametrize("torn", [1, 3, 50])
def test_torn_last_entry_is_cut_off(filled: Path, entries: list[bytes], torn: int) -> None:
    """A power cut in the middle of an append: the entry was never durable, and nobody was told that it was."""
    extra = make_submission(Identity.from_phrase("bob"), RUN).data
    with segments(filled)[-1].open("ab") as file:
        file.write((struct.pack(">I", len(extra)) + extra)[:torn])
    with opened(filled) as again:
        assert again.state.length == 18
        again.append([extra])
    with opened(filled) as again:
        assert again.entries(18, 9) == [extra]


def test_entries_that_the_index_missed_are_found(filled: Path, entries: list[bytes]) -> None:
    """A crash after the entry was synced and before the index was; and an index that is gone or garbage."""
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (filled / name).unlink(missing_ok=True)
    with opened(filled) as again:
        assert again.entries(0, 99) == entries
    (filled / "index.sqlite").write_bytes(b"no database" * 100)
    with opened(filled) as again:
        assert again.entries(0, 99) == entries


def damage(path: Path, what: str) -> tuple[int, int]:
    """Damage a ledger; the entry that is named, and how many a mirror keeps."""
    files = segments(path)
    match what:
        case "a byte":
            content = bytearray(files[2].read_bytes())
            content[700] ^= 1
            files[2].write_bytes(content)
            return 9, 9
        case "a length":
            content = bytearray(files[2].read_bytes())
            content[0] = 0xFF
            files[2].write_bytes(content)
            return 8, 8
        case "truncated in the middle":
            files[1].write_bytes(files[1].read_bytes()[:-5])
            return 7, 4
        case "truncated at the end":
            files[4].write_bytes(files[4].read_bytes()[:-5])
            return 17, 17
        case "missing in the middle":
            files[3].unlink()
            return 12, 12
        case _:
            files[4].unlink()
            return 16, 16


DAMAGES = [
    "a byte", "a length", "truncated in the middle", "truncated at the end", "missing in the middle",
    "missing at the end",
]  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named_and_nothing_is_changed(filled: Path, what: str) -> None:
    """A trainer's disk: entries that were durable are gone, or are others."""
    place, _ = damage(filled, what)
    named = rf"segment-0000000\d is damaged at entry {place}: "
    before = {path.name: path.read_bytes() for path in segments(filled)}
    for _ in range(2):
        with pytest.raises(DataDirError, match=named) as caught, opened(filled):
            pass
        assert "one back-up" in caught.value.hint
        assert {path.name: path.read_bytes() for path in segments(filled)} == before


@pytest.mark.parametrize("what", DAMAGES)
def test_a_mirror_goes_on_from_its_last_consistent_state(filled: Path, entries: list[bytes], what: str) -> None:
    _, place = damage(filled, what)
    with opened(filled, mends=True) as mended:
        assert mended.state.length == place
        assert mended.entries(0, 99) == entries[:place]
        mended.append(entries[place:])
        assert (mended.entries(0, 99), len(mended.segments())) == (entries, 4)
    assert what == "missing at the end" or list(filled.glob("damaged-*")), "what was damaged is kept"
    with opened(filled) as again:
        assert again.state.length == 18


def test_entries_before_a_refused_one_stay(tmp_path: Path, entries: list[bytes]) -> None:
    with opened(tmp_path / "ledger") as ledger, pytest.raises(LedgerError):
        ledger.append([entries[0], entries[0]])
    with opened(tmp_path / "ledger") as again:
        assert again.entries(0, 9) == entries[:1]


def test_a_full_disk_leaves_no_gap(tmp_path: Path, entries: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "ledger") as ledger:
        ledger.append(entries[:2])

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            for _ in range(2):
                with pytest.raises(DataDirError, match="No space left"):
                    ledger.append(entries[ledger.state.length : 4])
            assert ledger.entries(0, 9) == entries[:2]
        ledger.append(entries[ledger.state.length : 5])
        assert ledger.entries(0, 9) == entries[:5]
    with opened(tmp_path / "ledger") as again:
        assert again.state.length == 5


def test_what_the_disk_refused_is_written_without_any_further_entry(tmp_path: Path, entries: list[bytes]) -> None:
    with opened(tmp_path / "ledger") as ledger:
        with full_disk(), pytest.raises(DataDirError, match="cannot write the ledger"):
            ledger.append(entries[:2])
        assert (ledger.state.length, ledger.entries(0, 9)) == (2, [])
        with full_disk(), pytest.raises(DataDirError, match="cannot write the ledger"):
            ledger.flush()
        ledger.flush()
        assert ledger.entries(0, 9) == entries[:2]


def test_an_index_without_room_has_no_hole(tmp_path: Path, entries: list[bytes]) -> None:
    """An entry that fits into its segment's last block, while the index would have to grow."""
    with opened(tmp_path / "ledger") as ledger:
        ledger.append(entries[:2])
        with full_disk(room=4096):
            for _ in range(2):
                with pytest.raises(DataDirError, match="index"):
                    ledger.append(entries[ledger.state.length : 4])
            assert (ledger.entries(0, 9), ledger.entries(2, 9)) == (entries[:2], [])
        ledger.append(entries[4:])
        assert ledger.entries(0, 99) == entries
        assert ledger.ids(2, 5) == [open_entry(entry).id for entry in entries[2:5]]
    with opened(tmp_path / "ledger") as again:
        assert again.entries(0, 99) == entries


def test_a_segment_that_cannot_be_read_back_is_written_once(
    tmp_path: Path, entries: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full segment is hashed; its earlier part comes from a disk that fails."""

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path / "ledger") as ledger:
        for entry in entries[:3]:
            ledger.append([entry])
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", broken)
            with pytest.raises(DataDirError, match="Input/output error"):
                ledger.append(entries[3:6])
        ledger.append(entries[6:])
        assert ledger.entries(0, 99) == entries
    with opened(tmp_path / "ledger") as again:
        assert again.state.length == 18


def test_a_replay_whose_memory_fails_leaves_no_gap(tmp_path: Path, entries: list[bytes]) -> None:
    faults = [DataDirError("cannot read what the replay of the ledger remembers")]

    def settle() -> None:
        if state.length and faults:
            raise faults.pop()

    state = LedgerState(RUN, MANIFEST, memory=LedgerMemory(settle=settle))
    with closing(LedgerLog(tmp_path / "ledger", state, segment_bytes=SMALL)) as ledger:
        with pytest.raises(DataDirError, match="remembers"):
            ledger.append(entries[:4])
        ledger.append(entries[ledger.state.length : 4])
        assert ledger.entries(0, 9) == entries[:4]
    with opened(tmp_path / "ledger") as again:
        assert again.state.length == 4


@pytest.mark.parametrize("what", ["torn", "index"])
def test_a_ledger_that_cannot_be_opened_says_so(filled: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to be changed on opening cannot be: a torn end is cut off, an index that is garbage is made again."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if what == "torn":
        with segments(filled)[-1].open("ab") as file:
            file.write(b"\0\0")
        monkeypatch.setattr(os, "ftruncate", broken)
        with pytest.raises(DataDirError, match=r"cannot open the ledger .*Input/output error"), opened(filled):
            pass
    else:
        (filled / "index.sqlite").write_bytes(b"no database" * 100)
        with full_disk(), pytest.raises(DataDirError, match="cannot open the ledger's index"), opened(filled):
            pass


def test_mirror_takes_only_what_leads_to_the_signed_tip(tmp_path: Path, entries: list[bytes]) -> None:
    """A relay that rewrites history: its entries do not reach the tip in the trainer's head."""
    with opened(tmp_path / "trainer") as trainer, opened(tmp_path / "mirror") as mirror:
        trainer.append(entries[:3])
        with pytest.raises(ProtocolError, match="tip"):
            mirror.extend(entries[:2], length=3, tip=trainer.state.tip)
        with pytest.raises(ProtocolError, match="tip"):
            mirror.extend([entries[0], entries[2], entries[1]], length=3, tip=trainer.state.tip)
        assert mirror.state.length == 0
        mirror.extend(entries[:3], length=3, tip=trainer.state.tip)
        assert mirror.state.tip == trainer.state.tip


def test_index_knows_whom_entries_are_about(filled: Path, entries: list[bytes]) -> None:
    alice = Identity.from_phrase("alice").peer_id
    with opened(filled) as ledger:
        assert ledger.index.about(alice, kind="verdict", limit=2) == [17, 15]
        assert ledger.index.of_submission(open_entry(entries[4]).id) == [4, 5]


def step_rows(steps: range) -> list[Row]:
    """A batch and a trained step of each, as they follow each other in a ledger."""
    one = make_submission(Identity.from_phrase("alice"), RUN)
    entries = [open_entry(made) for step in steps for made in (make_batch(RUN, step, [one]), make_trained(RUN, step))]
    return [Row(2 * steps.start + at, (0, 0, 1), entry) for at, entry in enumerate(entries)]


def test_a_step_is_as_quickly_found_however_many_were_before(tmp_path: Path) -> None:
    with closing(LedgerIndex(tmp_path / "index.sqlite")) as index:
        index.add(step_rows(range(10)))
        assert index.of_step("batch", 0) == 0
        looks = []
        for end in (10, 300):
            if end > 10:
                index.add(step_rows(range(10, end)))
            with counted(index._db) as steps:
                found = [index.of_step(kind, end - 1) for kind in ("batch", "trained")]
                assert found == [2 * end - 2, 2 * end - 1]
                assert (index.of_step("batch", end), index.of_step("trained", end)) == (None, None)
            looks.append(steps.taken)
        assert looks == [0, 0]


def test_steps_of_an_index_that_was_cut_or_mended_are_found(tmp_path: Path, entries: list[bytes]) -> None:
    with closing(LedgerIndex(tmp_path / "index.sqlite")) as index:
        index.add(step_rows(range(4)))
        assert index.of_step("trained", 3) == 7
        index.cut(6)
        assert (index.of_step("trained", 2), index.of_step("batch", 3)) == (5, None)
        index.add(step_rows(range(3, 5)))
        assert (index.of_step("batch", 3), index.of_step("trained", 4)) == (6, 9)
        index.add([Row(0, (0, 0, 1), open_entry(entries[0]))])  # in the place of the first batch
        assert (index.of_step("batch", 0), index.of_step("trained", 0)) == (2, 1)


def single_file(path: Path, entries: list[bytes], tail: bytes = b"") -> None:
    """As earlier versions kept the ledger."""
    path.write_bytes(b"".join(struct.pack(">I", len(entry)) + entry for entry in entries) + tail)


@pytest.mark.parametrize("tail", [b"", b"\0\0\0"])
def test_single_file_of_an_earlier_version_becomes_segments(
    tmp_path: Path, filled: Path, entries: list[bytes], tail: bytes
) -> None:
    path = tmp_path / "old"
    single_file(path, entries, tail)
    assert [one.entries for one in read_segments(path, segment_bytes=SMALL)] == [
        one.entries for one in read_segments(filled, segment_bytes=SMALL)
    ], "and can be read as it is"
    with opened(path) as ledger, opened(filled) as other:
        assert (ledger.entries(0, 99), ledger.segments()) == (entries, other.segments())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ledger", "old"]


@pytest.mark.parametrize("crash_at", [1, 2])
def test_crash_while_the_single_file_becomes_segments(
    tmp_path: Path, entries: list[bytes], crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut before the first, or between the two renames."""
    path, renames = tmp_path / "old", 0
    single_file(path, entries)
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == crash_at:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt), opened(path):
            pass
    with opened(path) as ledger:
        assert ledger.entries(0, 99) == entries
    assert [one.name for one in tmp_path.iterdir()] == ["old"]


def test_damaged_single_file_stays_as_it_is(tmp_path: Path, entries: list[bytes]) -> None:
    path = tmp_path / "old"
    single_file(path, [entries[0], b"garbage", *entries[1:]])
    with pytest.raises(DataDirError, match="damaged at entry 1"), opened(path):
        pass


def test_proofs_of_work_are_checked_when_they_come_and_not_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of a run with a thousand contributors would otherwise start for a minute."""
    tries: list[bytes] = []
    monkeypatch.setattr("protocol.work.work_hash", lambda _, __, nonce: tries.append(nonce) or bytes(32))
    manifest = make_manifest(admission=AdmissionSpec(work_bits=1))
    first = [make_admission(Identity.from_phrase(name), RUN).data for name in ("alice", "bob")]
    for made, expected in ((first, 2), ([], 0), ([make_admission(Identity.from_phrase("carol"), RUN).data], 1)):
        tries.clear()
        with closing(LedgerLog(tmp_path / "ledger", LedgerState(RUN, manifest), segment_bytes=SMALL)) as ledger:
            ledger.append(made)
        assert len(tries) == expected
