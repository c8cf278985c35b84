"""A relay keeps to the ledger that it has: heads of a second trainer with the same key are refused and proved."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_submission, make_verdict
from relay_world import CAROL, MANIFEST, RUN, make_head, make_notice

from node.ledger.witness import DIRECTORY
from node.relay.desk import RelayDesk
from node.relay.store import RelayStore
from protocol.envelope import Signed
from protocol.errors import RefusedError
from protocol.forks import open_proof
from protocol.identity import Identity
from protocol.ledger import next_tip, open_entry
from protocol.records import Head

ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")


def ledger_of(*who: Identity) -> list[bytes]:
    submissions = [make_submission(one, MANIFEST.id) for one in who]
    return [data for one in submissions for data in (one.data, make_verdict(one).data)]


TRUE = ledger_of(ALICE, BOB)
OTHER = ledger_of(BOB, ALICE)


def head_over(entries: list[bytes], sequence: int) -> Signed[Head]:
    tip = MANIFEST.id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry).id)
    return make_head(sequence, ledger_length=len(entries), ledger_tip=tip)


@pytest.fixture
def desk(tmp_path: Path) -> RelayDesk:
    """It mirrors the true ledger, and agrees with its head."""
    made = RelayDesk(RUN, CAROL, store=RelayStore(tmp_path, max_bytes=1 << 20), ledger_path=tmp_path / "ledger")
    head = head_over(TRUE, 2)
    made.accept_origin(MANIFEST.data, make_notice(CAROL).data, head.data)
    made.extend_ledger(TRUE, head)
    made.witness.hold(head)
    return made


@pytest.mark.parametrize("length", [1, 2, 4])
def test_head_of_another_ledger_is_refused_and_proved(desk: RelayDesk, tmp_path: Path, length: int) -> None:
    """A second trainer runs with this key, or the first one was started from an old copy and went on from there."""
    for _ in range(2):
        with pytest.raises(RefusedError) as caught:
            desk.accept_head(head_over(OTHER[:length], 3).data)
        assert caught.value.code == "fork"
    with pytest.raises(RefusedError, match="contradicts"):
        desk.accept_origin(MANIFEST.data, make_notice(CAROL).data, head_over(OTHER[:length], 4).data)
    assert desk.head.record.sequence == 2
    first = open_proof(min((tmp_path / DIRECTORY).iterdir()).read_bytes())
    assert (first.shorter.record.ledger_length, first.longer.record.ledger_length) == (length, 4)
    assert "audit --fork" in desk.witness.warning
    desk.accept_head(head_over(TRUE, 5).data)


def test_heads_beyond_the_mirror_are_compared_with_each_other(desk: RelayDesk, tmp_path: Path) -> None:
    """The mirror lags behind both."""
    longer = ledger_of(ALICE, BOB, Identity.from_phrase("dave"))
    desk.accept_head(head_over(longer, 3).data)
    with pytest.raises(RefusedError, match="contradicts"):
        desk.accept_head(head_over([*OTHER, *longer[4:]], 4).data)
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 1


def test_earlier_heads_of_the_same_ledger_are_no_fork(desk: RelayDesk, tmp_path: Path) -> None:
    desk.accept_head(head_over(TRUE[:2], 3).data)
    assert desk.witness.warning == ""
    assert not (tmp_path / DIRECTORY).exists()
