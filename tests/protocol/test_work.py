"""Proof of work: found by trying, checked by one try, and bound to key and run."""

from __future__ import annotations

import pytest

from protocol.identity import Identity
from protocol.work import expected_tries, find_work, work_hash, work_holds, zero_bits

RUN = b"r" * 32
GOLDEN = "89a81a381e714940c52dd50291a628452e5b8a70fc26a577f3114ceda9ca4f54"


def test_golden_hash() -> None:
    """Another hash is another protocol: it decides who is admitted."""
    alice = Identity.from_phrase("alice").peer_id
    assert work_hash(alice, RUN, bytes(8)).hex() == GOLDEN


def test_work_is_found_and_holds(alice: Identity) -> None:
    tries: list[int] = []
    nonce = find_work(alice.peer_id, RUN, bits=1, each=tries.append)
    assert work_holds(alice.peer_id, RUN, nonce, bits=1)
    assert tries
    assert int.from_bytes(nonce, "big") == len(tries)


def test_work_of_another_key_or_run_is_none(alice: Identity, bob: Identity) -> None:
    """One proof is made once, and used for many keys or in many runs."""
    nonce = find_work(bob.peer_id, RUN, bits=2)
    assert not work_holds(alice.peer_id, RUN, nonce, bits=2)
    assert not work_holds(bob.peer_id, b"x" * 32, nonce, bits=2)


def test_the_search_can_be_stopped_and_resumed(alice: Identity) -> None:
    class Stop(Exception):
        pass

    def stop(tries: int) -> None:
        if tries == 2:
            raise Stop

    with pytest.raises(Stop):
        find_work(alice.peer_id, RUN, bits=32, each=stop)
    assert find_work(alice.peer_id, RUN, bits=1, first=3) == (5).to_bytes(8, "big")


def test_without_bits_any_nonce_will_do(alice: Identity) -> None:
    assert work_holds(alice.peer_id, RUN, b"anything", bits=0)


@pytest.mark.parametrize(
    ("digest", "bits"),
    [(b"\xff" * 32, 0), (b"\x7f" + bytes(31), 1), (bytes(1) + b"\x80" + bytes(30), 8), (bytes(32), 256)],
)
def test_zero_bits_are_counted_from_the_front(digest: bytes, bits: int) -> None:
    assert zero_bits(digest) == bits


def test_each_bit_doubles_the_tries() -> None:
    assert [expected_tries(bits) for bits in (0, 1, 8)] == [1, 2, 256]
