"""The ledger on disk: what was appended is there after any crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_manifest, make_submission, make_verdict

from node.ledger_file import LedgerFile
from protocol.errors import DataDirError, LedgerError, ProtocolError
from protocol.identity import Identity
from protocol.ledger import LedgerState

RUN = b"r" * 32


def open_ledger(path: Path) -> LedgerFile:
    return LedgerFile(path, LedgerState(RUN, make_manifest()))


@pytest.fixture
def entries() -> list[bytes]:
    first = make_submission(Identity.from_phrase("alice"), RUN)
    second = make_submission(Identity.from_phrase("alice"), RUN, index=1)
    return [first.data, make_verdict(first).data, second.data]


def test_reopened_ledger_has_the_same_state(tmp_path: Path, entries: list[bytes]) -> None:
    ledger = open_ledger(tmp_path / "ledger")
    ledger.append(entries)
    again = open_ledger(tmp_path / "ledger")
    assert (again.state.length, again.state.tip) == (3, ledger.state.tip)
    assert again.entries(1, 5) == entries[1:]


@pytest.mark.parametrize("cut", [1, 3, 50])
def test_torn_last_entry_is_cut_off(tmp_path: Path, entries: list[bytes], cut: int) -> None:
    """A power cut in the middle of an append."""
    path = tmp_path / "ledger"
    open_ledger(path).append(entries)
    path.write_bytes(path.read_bytes()[:-cut])
    again = open_ledger(path)
    assert again.state.length == 2
    again.append(entries[2:])
    assert open_ledger(path).state.length == 3


def test_damaged_entry_is_named_and_nothing_is_dropped(tmp_path: Path, entries: list[bytes]) -> None:
    path = tmp_path / "ledger"
    open_ledger(path).append(entries)
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataDirError, match="entry 0 of the ledger"):
        open_ledger(path)
    assert path.read_bytes() == content


def test_entries_before_a_refused_one_stay(tmp_path: Path, entries: list[bytes]) -> None:
    ledger = open_ledger(tmp_path / "ledger")
    with pytest.raises(LedgerError):
        ledger.append([entries[0], entries[0]])
    assert open_ledger(tmp_path / "ledger").entries(0, 9) == entries[:1]


def test_mirror_takes_only_what_leads_to_the_signed_tip(tmp_path: Path, entries: list[bytes]) -> None:
    """A relay that rewrites history: its entries do not reach the tip in the trainer's head."""
    trainer, mirror = open_ledger(tmp_path / "trainer"), open_ledger(tmp_path / "mirror")
    trainer.append(entries)
    with pytest.raises(ProtocolError, match="tip"):
        mirror.extend(entries[:2], length=3, tip=trainer.state.tip)
    with pytest.raises(ProtocolError, match="tip"):
        mirror.extend([entries[0], entries[2], entries[1]], length=3, tip=trainer.state.tip)
    assert mirror.state.length == 0
    mirror.extend(entries, length=3, tip=trainer.state.tip)
    assert mirror.state.tip == trainer.state.tip
