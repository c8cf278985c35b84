"""Proving a key: what a relay accepts, for how long, and what it cannot be talked into."""

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.tokens import CHALLENGE_S, TOKEN_S, TokenMint
from protocol.envelope import open_envelope, seal
from protocol.errors import RefusedError, WrongAuthorError, WrongRunError
from protocol.identity import Identity
from protocol.records import Hello

ALICE, BOB, CAROL, DAVE = (Identity.from_phrase(name) for name in ("alice", "bob", "carol", "dave"))
RUN = b"r" * 32


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def carol(clock):
    """Carol's relay."""
    return TokenMint(CAROL.peer_id, RUN, clock=clock)


def hello(mint, *, by=ALICE, key=ALICE, relay=CAROL, run=RUN):
    nonce = mint.challenge(key.peer_id.public_key)
    return open_envelope(seal(Hello(run=run, relay=relay.peer_id.public_key, nonce=nonce), by), Hello)


def refused(action, code):
    with pytest.raises(RefusedError) as caught:
        action()
    assert caught.value.code == code


def test_a_proved_key_gets_a_token_that_names_it(carol):
    peer = carol.check_hello(hello(carol))
    assert peer == ALICE.peer_id
    assert carol.holder(f"Bearer {carol.token(peer)}") == ALICE.peer_id


def test_a_token_ends(carol, clock):
    token = f"Bearer {carol.token(ALICE.peer_id)}"
    clock.now += TOKEN_S - 1
    assert carol.holder(token) == ALICE.peer_id
    clock.now += 2
    refused(lambda: carol.holder(token), "unauthorized")


def test_an_old_challenge_is_refused(carol, clock):
    """Replay: an answer that was overheard is used later."""
    said = hello(carol)
    clock.now += CHALLENGE_S + 1
    refused(lambda: carol.check_hello(said), "stale-challenge")


def test_a_challenge_is_for_one_key(carol):
    """Mallory answers the challenge that was made for Alice."""
    refused(lambda: carol.check_hello(hello(carol, by=BOB)), "stale-challenge")


def test_a_hello_is_for_one_relay(carol):
    """Relaying: Dave's relay passes Carol's challenge to Alice, to be let in at Carol's as Alice."""
    with pytest.raises(WrongAuthorError):
        carol.check_hello(hello(carol, relay=DAVE))


def test_a_hello_is_for_one_run(carol):
    with pytest.raises(WrongRunError):
        carol.check_hello(hello(carol, run=b"x" * 32))


def test_another_process_knows_neither_challenge_nor_token(carol, clock):
    """A relay that started again, or another relay with the same key."""
    other = TokenMint(CAROL.peer_id, RUN, clock=clock)
    refused(lambda: other.check_hello(hello(carol)), "stale-challenge")
    refused(lambda: other.holder(f"Bearer {carol.token(ALICE.peer_id)}"), "unauthorized")


def test_a_token_cannot_be_made_into_another(carol):
    """Every bit of a token is under its MAC: key, end and MAC itself."""
    token = base64.urlsafe_b64decode(carol.token(ALICE.peer_id))
    for index in range(len(token)):
        changed = bytearray(token)
        changed[index] ^= 1
        text = base64.urlsafe_b64encode(bytes(changed)).decode()
        refused(lambda text=text: carol.holder(f"Bearer {text}"), "unauthorized")


def test_a_challenge_is_no_token(carol):
    """Both are under one MAC key; what is signed says which is which."""
    nonce = base64.urlsafe_b64encode(carol.challenge(ALICE.peer_id.public_key)).decode()
    refused(lambda: carol.holder(f"Bearer {nonce}"), "unauthorized")


@given(header=st.one_of(st.text(max_size=300), st.binary(max_size=120).map(lambda b: f"Bearer {b.hex()}")))
def test_any_header_is_refused_by_name(header):
    refused(lambda: TokenMint(CAROL.peer_id, RUN).holder(header), "unauthorized")


@given(nonce=st.binary(min_size=16, max_size=128))
def test_any_nonce_is_refused_by_name(nonce):
    said = open_envelope(seal(Hello(run=RUN, relay=CAROL.peer_id.public_key, nonce=nonce), ALICE), Hello)
    refused(lambda: TokenMint(CAROL.peer_id, RUN).check_hello(said), "stale-challenge")


def test_hello_fits_its_bound():
    record = Hello(run=RUN, relay=CAROL.peer_id.public_key, nonce=b"n" * 128)
    assert len(msgspec.msgpack.encode(record)) < Hello.MAX_BYTES
