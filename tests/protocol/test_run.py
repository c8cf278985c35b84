import hashlib

import pytest
from factories import OPERATOR, make_manifest
from hypothesis import given
from hypothesis import strategies as st

from protocol.envelope import seal
from protocol.errors import MalformedError, ProtocolError, WrongAuthorError
from protocol.identity import Identity
from protocol.run import RunAddress

ADDRESS = RunAddress(OPERATOR.peer_id, "test")


def test_an_address_survives_as_text():
    assert str(ADDRESS) == f"{OPERATOR.peer_id}/test"
    assert RunAddress.parse(str(ADDRESS)) == ADDRESS


def test_golden_digest():
    assert ADDRESS.digest == hashlib.sha256(b"intellect-node run\0" + f"{OPERATOR.peer_id}/test".encode()).digest()
    assert ADDRESS.digest.hex() == "9af2825567c4350a18d0b8d12da359496ea7c51fb970a047d1096780c6bc4618"
    assert RunAddress(OPERATOR.peer_id, "other").digest != ADDRESS.digest


@pytest.mark.parametrize("name", ["", "Test", "a b", "-a", ".a", "..", "a/b", "test\n", "a\0", "é", "a" * 65], ids=repr)
def test_wrong_names_are_refused_with_the_next_step(name):
    with pytest.raises(MalformedError, match="not a run address") as caught:
        RunAddress.parse(f"{OPERATOR.peer_id}/{name}")
    assert "run create" in caught.value.hint


def test_an_address_without_a_name_or_operator_is_refused():
    for text in (str(OPERATOR.peer_id), "test", "/test", "nobody/test", ""):
        with pytest.raises(MalformedError):
            RunAddress.parse(text)


@given(st.text())
def test_any_text_is_an_address_or_malformed(text):
    for candidate in (text, f"{OPERATOR.peer_id}/{text}", f"{text}/test"):
        try:
            address = RunAddress.parse(candidate)
        except ProtocolError:
            continue
        assert RunAddress.parse(str(address)) == address


def test_the_operators_manifest_is_opened():
    manifest = make_manifest()
    assert ADDRESS.open_manifest(seal(manifest, OPERATOR)).record == manifest


def test_another_authors_manifest_is_refused():
    """Somebody answers a look-up with a run of their own."""
    mallory = Identity.from_phrase("mallory")
    with pytest.raises(WrongAuthorError, match=mallory.peer_id.short):
        ADDRESS.open_manifest(seal(make_manifest(), mallory))


def test_another_run_of_the_same_operator_is_refused():
    """A relay serves an old run's manifest under a new run's address."""
    with pytest.raises(MalformedError, match="'other'"):
        ADDRESS.open_manifest(seal(make_manifest(name="other"), OPERATOR))
