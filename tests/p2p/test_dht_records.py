"""What may lie in the DHT under which key, and what servers keep of it: no sockets."""

import time

import pytest
from factories import make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.record import make_put_record
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, MALLORY, RUN, advert, now_ms, pointer

from p2p import dht_records, dht_stores
from p2p.dht_records import RecordValidator, relay_key, relays_key, run_key
from p2p.dht_stores import ProviderStore, ValueStore
from p2p.host import to_libp2p
from protocol.constants import MAX_DHT_VALUE_BYTES
from protocol.envelope import seal
from protocol.errors import (
    ClockError,
    MalformedError,
    ProtocolError,
    SignatureError,
    StaleRecordError,
    WrongAuthorError,
    WrongRunError,
)
from protocol.identity import Identity
from protocol.run import RunAddress

RELAY_KEY = relay_key(RUN, BOB.peer_id)


def test_keys_fit_what_servers_answer():
    assert run_key(RUN) == f"/intellect/run/{RUN.digest[:20].hex()}/{ALICE.peer_id}"
    assert all(len(key) <= dht_records.MAX_KEY_BYTES for key in (run_key(RUN), RELAY_KEY))
    assert len(relays_key(RUN)) <= 80


def test_records_of_their_own_key_are_valid():
    validator = RecordValidator()
    assert validator.open(run_key(RUN), pointer(3)).record.sequence == 3
    assert validator.open(RELAY_KEY, advert(4)).author == BOB.peer_id


def test_foreign_author_is_refused():
    """Attack: announce another relay's address, or another operator's run, under its key."""
    with pytest.raises(WrongAuthorError):
        RecordValidator().validate(RELAY_KEY, advert(by=MALLORY))
    with pytest.raises(WrongAuthorError):
        RecordValidator().validate(run_key(RUN), pointer(by=MALLORY))


def test_broken_signature_is_refused():
    """Attack: change a byte of a value on its way."""
    value = bytearray(advert())
    value[-1] ^= 1
    with pytest.raises(SignatureError):
        RecordValidator().validate(RELAY_KEY, bytes(value))


def test_record_of_another_run_is_refused():
    """Attack: put a record where another run looks for it."""
    other = RunAddress(ALICE.peer_id, "other")
    with pytest.raises(WrongRunError):
        RecordValidator().validate(relay_key(other, BOB.peer_id), advert())
    with pytest.raises(WrongRunError):
        RecordValidator().validate(run_key(other), pointer())


def test_pointer_to_a_foreign_manifest_is_refused():
    """Attack: lead contributors of a run to a manifest that its operator did not sign."""
    foreign = seal(make_manifest(), MALLORY)
    with pytest.raises(WrongAuthorError):
        RecordValidator().validate(run_key(RUN), pointer(manifest=foreign))


def test_time_bounds():
    """Attack: replay an old address, or occupy a key with a record from the future or without end."""
    validator = RecordValidator()
    with pytest.raises(ClockError, match="ended"):
        validator.validate(RELAY_KEY, advert(valid_until_ms=now_ms() - 1))
    with pytest.raises(ClockError, match="future"):
        validator.validate(RELAY_KEY, advert(issued_at_ms=now_ms() + 200_000))
    with pytest.raises(MalformedError, match="valid for more than"):
        validator.validate(RELAY_KEY, advert(valid_until_ms=now_ms() + 10_000_000))
    validator.validate(RELAY_KEY, advert(issued_at_ms=now_ms() + 60_000))


def test_clock_is_the_given_one():
    with pytest.raises(ClockError):
        RecordValidator(lambda: time.time() + 700).validate(RELAY_KEY, advert())


def test_large_values_are_refused():
    """Attack: fill servers' memory with large values."""
    with pytest.raises(MalformedError, match="at most"):
        RecordValidator().validate(RELAY_KEY, b"x" * (MAX_DHT_VALUE_BYTES + 1))


@pytest.mark.parametrize(
    "key", ["", "/pk/x", "/ipns/x", "/intellect/x", RELAY_KEY + "x" * 80, RELAY_KEY + "\n", RELAY_KEY.upper()]
)
def test_other_keys_are_refused(key):
    """Attack: use the DHT as free storage."""
    with pytest.raises(MalformedError):
        RecordValidator().validate(key, advert())


@settings(deadline=None)
@given(st.text(), st.binary())
def test_any_bytes_give_a_protocol_error(key, value):
    for one in (key, RELAY_KEY):
        with pytest.raises(ProtocolError):
            RecordValidator().validate(one, value)
    assert RecordValidator().select(RELAY_KEY, [value, advert(), value]) == 1


def test_highest_sequence_wins_and_the_last_of_equals():
    select = RecordValidator().select
    assert select(RELAY_KEY, [advert(2), advert(3), advert(1)]) == 1
    assert select(RELAY_KEY, [advert(2), advert(2)]) == 1
    assert select(RELAY_KEY, [advert(2), advert(9, by=MALLORY)]) == 0


def value_store(clock=time.time):
    return ValueStore(RecordValidator(clock), run_digest=RUN.digest[:20].hex(), own=BOB.peer_id, clock=clock)


def test_full_store_keeps_own_and_this_runs_values(monkeypatch):
    """Attack: fill a server's store with values of made-up keys and runs."""
    monkeypatch.setattr(dht_stores, "MAX_VALUES", 4)
    store = value_store()
    store.put_record(RELAY_KEY.encode(), make_put_record(b"", advert()))
    carols = relay_key(RUN, CAROL.peer_id).encode()
    store.put_record(carols, make_put_record(b"", advert(by=CAROL)))
    junk = RunAddress(MALLORY.peer_id, "junk")
    for number in range(12):
        made_up = Identity.from_phrase(str(number))
        record = make_put_record(b"", advert(by=made_up, run=junk.digest))
        store.put_record(relay_key(junk, made_up.peer_id).encode(), record)
    assert store.size() == 4
    assert store.get(RELAY_KEY.encode()) is not None
    assert store.get(carols) is not None
    for number in range(12):
        made_up = Identity.from_phrase(str(number))
        store.put_record(relay_key(RUN, made_up.peer_id).encode(), make_put_record(b"", advert(by=made_up)))
    assert store.size() == 4
    assert store.get(RELAY_KEY.encode()) is not None


def test_second_value_of_one_sequence_is_refused():
    """Attack: sign two values with one sequence, so that readers disagree."""
    store = value_store()
    first = advert(5)
    store.put_record(RELAY_KEY.encode(), make_put_record(b"", first))
    store.put_record(RELAY_KEY.encode(), make_put_record(b"", first))
    with pytest.raises(StaleRecordError):
        store.put_record(RELAY_KEY.encode(), make_put_record(b"", advert(5, software="other")))
    with pytest.raises(StaleRecordError):
        store.put_record(RELAY_KEY.encode(), make_put_record(b"", advert(4)))
    assert store.get(RELAY_KEY.encode()).value == first


def test_runs_pointer_is_never_pushed_out(monkeypatch):
    """Attack: fill a relay's store with values of its own run."""
    monkeypatch.setattr(dht_stores, "MAX_VALUES", 4)
    store = value_store()
    store.put_record(run_key(RUN).encode(), make_put_record(b"", pointer()))
    for number in range(20):
        made_up = Identity.from_phrase(str(number))
        store.put_record(relay_key(RUN, made_up.peer_id).encode(), make_put_record(b"", advert(by=made_up)))
    assert store.size() == 4
    assert store.get(run_key(RUN).encode()) is not None


def test_full_store_is_quick():
    """Attack: fill a server's store to its limit; libp2p's then blocks its loop for seconds at every put."""
    store = value_store()
    held = make_put_record(b"", advert())
    for number in range(dht_stores.MAX_VALUES):
        store._values[f"/intellect/relay/other/{number}".encode()] = dht_stores._Value(held, 1e12, 1, number)
    for number in range(50):
        made_up = Identity.from_phrase(str(number))
        record = make_put_record(b"", advert(by=made_up))
        store.put_record(relay_key(RUN, made_up.peer_id).encode(), record, sender=number)
    assert store.size() == dht_stores.MAX_VALUES


def test_value_from_the_future_names_the_clock():
    with pytest.raises(ClockError, match="this computer's is behind") as caught:
        RecordValidator().validate(RELAY_KEY, advert(issued_at_ms=now_ms() + 3_600_000))
    assert "timedatectl" in caught.value.hint


def test_values_end_with_their_validity():
    now = time.time()
    store = value_store(lambda: now)
    store.put_record(RELAY_KEY.encode(), make_put_record(b"", advert()))
    now += 700
    assert store.get(RELAY_KEY.encode()) is None
    assert store.size() == 0


def test_providers_are_bounded_and_expire():
    """Attack: fill the provider store with keys and providers; libp2p keeps the first twenty for two days."""
    now = time.time()
    own = to_libp2p(BOB.peer_id)
    store = ProviderStore(own_key=relays_key(RUN), own=own, clock=lambda: now)
    store.add_provider(relays_key(RUN), PeerInfo(own, []))
    store.add_provider(b"anything", PeerInfo(own, []))
    store.add_provider(relays_key(RUN), PeerInfo(to_libp2p(MALLORY.peer_id), [Multiaddr("/ip4/10.0.0.1/tcp/1")] * 100))
    for number in range(100):
        made_up = PeerInfo(to_libp2p(Identity.from_phrase(str(number)).peer_id), [])
        store.add_provider(relays_key(RUN), made_up)
        store.add_provider(relays_key(RunAddress(ALICE.peer_id, f"run{number}")), made_up)
    assert len(store.get_providers(relays_key(RUN))) == dht_stores.MAX_PROVIDERS
    assert own in {info.peer_id for info in store.get_providers(relays_key(RUN))}
    assert store.size() == dht_stores.MAX_PROVIDERS + dht_stores.MAX_PROVIDER_KEYS - 1
    now += 1000
    store.cleanup_expired()
    assert store.size() == 0
