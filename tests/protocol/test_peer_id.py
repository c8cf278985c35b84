import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError, ProtocolError
from protocol.identity import Identity, PeerId


@pytest.fixture
def alice():
    return Identity.from_phrase("alice")


@pytest.fixture
def bob():
    return Identity.from_phrase("bob")


def test_peer_id_is_libp2ps_for_the_same_seed(alice):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libp2p's own imports deprecate is not this test's matter
        from libp2p.crypto.ed25519 import create_new_key_pair
        from libp2p.peer.id import ID

    pair = create_new_key_pair(alice.seed)
    assert ID.from_pubkey(pair.public_key).to_base58() == str(alice.peer_id)
    assert pair.public_key.to_bytes() == alice.peer_id.public_key
    assert alice.peer_id.verify(b"message", pair.private_key.sign(b"message"))


def test_golden_peer_id(alice):
    assert str(alice.peer_id) == "12D3KooWQCkBm1BYtkHpocxCwMgR8yjitEeHGx8spzcDLGt2gkBm"
    assert alice.peer_id.short == "LGt2gkBm"


def test_peer_id_survives_as_text(alice):
    assert PeerId.parse(str(alice.peer_id)) == alice.peer_id


@given(st.binary(min_size=32, max_size=32))
def test_every_key_survives_as_text(key):
    text = str(PeerId(key))
    assert text.startswith("12D3KooW")
    assert PeerId.parse(text).public_key == key


@given(st.text())
def test_any_text_is_a_peer_id_or_malformed(text):
    try:
        peer = PeerId.parse(text)
    except ProtocolError:
        return
    assert PeerId.parse(str(peer)) == peer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "0OIl",
        "é" * 52,
        "1" * 52,
        "12D3KooW" * 10_000,
    ],
    ids=["empty", "prefix", "rsa", "alphabet", "unicode", "ones", "long"],
)
def test_what_is_no_ed25519_peer_id_is_refused(text):
    with pytest.raises(MalformedError, match="peer id"):
        PeerId.parse(text)


def test_a_longer_or_shorter_id_is_refused(alice):
    for text in (str(alice.peer_id)[:-1], str(alice.peer_id) + "1", "1" + str(alice.peer_id)):
        with pytest.raises(MalformedError):
            PeerId.parse(text)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_keys_of_another_length_are_refused(size):
    with pytest.raises(MalformedError, match="32 bytes"):
        PeerId(bytes(size))
    with pytest.raises(MalformedError, match="32 bytes"):
        Identity(bytes(size))


def test_signatures_hold_for_their_message_and_author_only(alice, bob):
    signature = alice.sign(b"message")
    assert alice.peer_id.verify(b"message", signature)
    assert not alice.peer_id.verify(b"messagE", signature)
    assert not bob.peer_id.verify(b"message", signature)
    assert not alice.peer_id.verify(b"message", bytes(64))


@given(st.binary(max_size=80), st.binary(min_size=32, max_size=32))
def test_verify_never_raises(signature, key):
    """Neither points off the curve nor signatures of any length may raise: only say no."""
    assert not PeerId(key).verify(b"message", signature)
    assert not PeerId(key).verify(b"message", signature.ljust(64, b"\0")[:64])


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32])
def test_weak_keys_sign_nothing(key):
    """Small-order keys for which one signature would hold for every message."""
    for signature in (bytes(64), b"\x01" + bytes(63), key + bytes(32)):
        assert not PeerId(key).verify(b"message", signature)


def test_signatures_are_not_malleable(alice):
    """Adding the group order to the second half gives another signature that lax verifiers accept."""
    order = 2**252 + 27742317777372353535851937790883648493
    signature = alice.sign(b"message")
    lifted = (int.from_bytes(signature[32:], "little") + order) % 2**256
    assert not alice.peer_id.verify(b"message", signature[:32] + lifted.to_bytes(32, "little"))


def test_an_identity_does_not_print_its_seed(alice):
    assert alice.seed.hex() not in repr(alice)
    assert str(alice.seed) not in repr(alice)
    assert str(alice.peer_id) in repr(alice)
