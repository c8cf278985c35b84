"""Proofs of a trainer's two ledgers: what convicts, and that nothing else does."""

from __future__ import annotations

import pytest
from factories import OPERATOR, make_head, make_manifest, sealed
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import Signed
from protocol.errors import ProtocolError
from protocol.forks import make_proof, open_proof
from protocol.identity import Identity
from protocol.ledger import next_tip
from protocol.records import Head

MANIFEST = sealed(make_manifest(), OPERATOR)
RUN = MANIFEST.id


def ids(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(32, b".") for number in range(count)]


def tip_of(entries: list[bytes], length: int) -> bytes:
    tip = RUN
    for entry in entries[:length]:
        tip = next_tip(tip, entry)
    return tip


def head(entries: list[bytes], length: int, sequence: int, *, by: Identity = OPERATOR) -> Signed[Head]:
    return make_head(RUN, sequence, by=by, ledger_length=length, ledger_tip=tip_of(entries, length))


TRUE = ids("true", 6)
OTHER = [*TRUE[:2], *ids("other", 6)]


def test_two_heads_of_one_length_convict() -> None:
    fork = open_proof(make_proof(MANIFEST, head(TRUE, 4, 1), head(OTHER, 4, 2)))
    assert (fork.trainer, fork.between, str(fork.run)) == (OPERATOR.peer_id, 0, f"{OPERATOR.peer_id}/test")


def test_a_longer_ledger_that_does_not_continue_the_shorter_convicts() -> None:
    shorter, longer = head(TRUE, 3, 1), head(OTHER, 6, 2)
    fork = open_proof(make_proof(MANIFEST, longer, shorter, base=tip_of(OTHER, 3), between=OTHER[3:6]))
    assert (fork.shorter.id, fork.longer.id, fork.between) == (shorter.id, longer.id, 3)


@pytest.mark.parametrize("start", [0, 2, 3, 5])
def test_an_honest_trainer_cannot_be_convicted(start: int) -> None:
    """Somebody hands in true heads with false or misplaced entries between them."""
    shorter, longer = head(TRUE, 3, 1), head(TRUE, 6, 2)
    for between in (TRUE[3:6], OTHER[3:6], TRUE[start : start + 3], TRUE[4:6], []):
        for base in (tip_of(TRUE, start), tip_of(OTHER, start), None):
            with pytest.raises(ProtocolError):
                make_proof(MANIFEST, shorter, longer, base=base, between=between)
    with pytest.raises(ProtocolError, match="do not contradict"):
        make_proof(MANIFEST, head(TRUE, 4, 1), head(TRUE, 4, 2))


def test_heads_of_another_key_or_run_convict_nobody() -> None:
    """A relay signs a head itself, or takes one from another run of the same trainer."""
    with pytest.raises(ProtocolError, match="signed by"):
        make_proof(MANIFEST, head(TRUE, 4, 1), head(OTHER, 4, 2, by=Identity.from_phrase("relay")))
    elsewhere = make_head(b"x" * 32, 2, ledger_length=4, ledger_tip=b"t" * 32)
    with pytest.raises(ProtocolError, match="another run"):
        make_proof(MANIFEST, head(TRUE, 4, 1), elsewhere)


PROOF = make_proof(MANIFEST, head(TRUE, 3, 1), head(OTHER, 6, 2), base=tip_of(OTHER, 3), between=OTHER[3:6])


@given(st.integers(0, len(PROOF) - 1), st.integers(1, 255))
def test_a_changed_proof_is_none(place: int, change: int) -> None:
    changed = bytearray(PROOF)
    changed[place] ^= change
    with pytest.raises(ProtocolError):
        open_proof(bytes(changed))


@given(st.binary(max_size=300) | st.integers(0, len(PROOF) - 1).map(lambda end: PROOF[:end]))
def test_any_bytes_are_a_proof_or_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_proof(data)
