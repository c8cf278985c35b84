import contextlib
import hashlib

import msgspec
import pytest
from factories import make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.envelope import Record, Signed, kind_of, open_envelope, seal
from protocol.errors import MalformedError, ProtocolError, SignatureError, VersionError, WrongAuthorError
from protocol.identity import Identity
from protocol.records import Manifest, Receipt, Submission

ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
RECEIPT = Receipt(run_id=b"r" * 32, submission=b"s" * 32, head_sequence=7, received_at_ms=1_700_000_000_000)
DATA = seal(RECEIPT, ALICE)
FIELDS = ("domain", "kind", "author", "payload", "signature")


def altered(**changes):
    return msgspec.msgpack.encode(msgspec.msgpack.decode(DATA) | changes)


def signed(*, payload, domain="intellect-node/1", kind="receipt", identity=ALICE):
    """An envelope whose signature holds, around any payload."""
    parts = (domain.encode(), kind.encode(), identity.peer_id.public_key, payload)
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    values = (domain, kind, identity.peer_id.public_key, payload, identity.sign(message))
    return msgspec.msgpack.encode(dict(zip(FIELDS, values, strict=True)))


def packed(**changes):
    return signed(payload=msgspec.msgpack.encode(msgspec.structs.asdict(RECEIPT) | changes))


def test_what_is_sealed_opens():
    opened = open_envelope(DATA, Receipt)
    assert (opened.record, opened.author, opened.data) == (RECEIPT, ALICE.peer_id, DATA)
    assert kind_of(DATA) == "receipt"


def test_golden_bytes():
    """Wire bytes of one record. A change here is another protocol version."""
    assert DATA.hex() == (
        "85a6646f6d61696eb0696e74656c6c6563742d6e6f64652f31a46b696e64a772656365697074a6617574686f72c420d5"
        "bf4a3fcce717b0388bcc2749ebc148ad9969b23f45ee1b605fd58778576ac4a77061796c6f6164c47e84a672756e5f69"
        "64c4207272727272727272727272727272727272727272727272727272727272727272aa7375626d697373696f6ec420"
        "7373737373737373737373737373737373737373737373737373737373737373ad686561645f73657175656e636507ae"
        "72656365697665645f61745f6d73cf0000018bcfe56800a97369676e6174757265c440e68938bddf4d78ec4b7695e228"
        "188280534ae43d6f562331d27e135f11770a78fc83627843ac0c678cdee68d0daf9115c104d30ae12090215fe7f5dbac"
        "e0a007"
    )
    assert open_envelope(DATA, Receipt).id.hex() == "bb4677174f1dd5acda6733374cf0c3561bb64cc2c8b1aa1961854ac03cfc4444"


def test_signed_bytes_are_the_documented_ones():
    assert signed(payload=msgspec.msgpack.encode(RECEIPT)) == DATA
    message = b"".join(
        len(part).to_bytes(4, "big") + part
        for part in (b"intellect-node/1", b"receipt", ALICE.peer_id.public_key, msgspec.msgpack.encode(RECEIPT))
    )
    assert open_envelope(DATA, Receipt).id == hashlib.sha256(message).digest()


def test_re_encoding_does_not_change_the_id():
    """A relay re-orders the envelope's fields, or encodes them less tightly, to give a statement a second identity."""
    fields = msgspec.msgpack.decode(DATA)
    reordered = msgspec.msgpack.encode(dict(reversed(fields.items())))
    wider = DATA.replace(b"\xa7receipt", b"\xd9\x07receipt")
    assert len({DATA, reordered, wider}) == 3
    assert {open_envelope(data, Receipt).id for data in (DATA, reordered, wider)} == {open_envelope(DATA, Receipt).id}


def test_ids_differ_between_authors_and_records():
    other = msgspec.structs.replace(RECEIPT, head_sequence=8)
    envelopes = [DATA, seal(RECEIPT, BOB), seal(other, ALICE)]
    assert len({open_envelope(data, Receipt).id for data in envelopes}) == 3


@pytest.mark.parametrize("field", ["author", "payload", "signature"])
def test_a_changed_field_breaks_the_signature(field):
    """Somebody edits an envelope on its way, or puts their own name on it."""
    value = bytearray(msgspec.msgpack.decode(DATA)[field])
    value[-1] ^= 1
    with pytest.raises(SignatureError, match="does not hold"):
        open_envelope(altered(**{field: bytes(value)}), Receipt)


def test_a_signature_counts_for_its_kind_only():
    """A statement of one kind is presented as one of another with the same fields."""

    class Lookalike(Receipt, frozen=True, kw_only=True):
        KIND = "lookalike"

    with pytest.raises(MalformedError, match="expected a lookalike, got a 'receipt'"):
        open_envelope(DATA, Lookalike)
    with pytest.raises(SignatureError):
        open_envelope(altered(kind="lookalike"), Lookalike)


def test_another_version_is_refused_by_name():
    with pytest.raises(VersionError) as caught:
        open_envelope(signed(payload=b"\x80", domain="intellect-node/2"), Receipt)
    assert "'intellect-node/2'" in caught.value.message
    assert "'intellect-node/1'" in caught.value.message
    assert ALICE.peer_id.short in caught.value.message
    assert "'intellect-node/2'" in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("domain", "hint"),
    [
        (
            "intellect-node/2",
            "install the intellect-node release that speaks 'intellect-node/2': pip install --upgrade",
        ),
        ("intellect-node/0", "ask that peer to install the intellect-node release that speaks 'intellect-node/1'"),
        ("other/1", "install the intellect-node release that speaks 'other/1'"),
    ],
)
def test_the_older_of_two_versions_is_told_to_upgrade(domain, hint):
    with pytest.raises(VersionError) as caught:
        open_envelope(signed(payload=b"\x80", domain=domain), Receipt)
    assert caught.value.hint.startswith(hint)


def test_a_version_error_is_short_whatever_it_quotes():
    """A peer fills a log with a domain and kind of megabytes."""
    with pytest.raises(VersionError) as caught:
        open_envelope(altered(domain="d" * 900, kind="k" * 900, author=b""), Receipt)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "data",
    [
        altered(extra=1),
        altered(author=b"short"),
        altered(author="text"),
        altered(signature=None),
        DATA + b"\0",
        DATA[:-1],
        b"",
        b"\xc0",
        b"\x91" * 5000,
        msgspec.msgpack.encode(list(msgspec.msgpack.decode(DATA).values())),
    ],
    ids=["extra", "author", "type", "null", "trailing", "truncated", "empty", "nil", "nested", "array"],
)
def test_broken_envelopes_are_refused(data):
    with pytest.raises(MalformedError):
        open_envelope(data, Receipt)


def test_a_missing_field_is_refused():
    for field in FIELDS:
        values = msgspec.msgpack.decode(DATA)
        del values[field]
        with pytest.raises(MalformedError, match=field):
            open_envelope(msgspec.msgpack.encode(values), Receipt)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"surprise": 1}, "surprise"),
        ({"run_id": b"r" * 31}, "run_id"),
        ({"head_sequence": -1}, "head_sequence"),
        ({"head_sequence": 2**60}, "head_sequence"),
        ({"head_sequence": "7"}, "head_sequence"),
        ({"head_sequence": 7.5}, "head_sequence"),
        ({"received_at_ms": None}, "received_at_ms"),
    ],
)
def test_broken_records_with_a_good_signature_are_refused(changes, reason):
    """A known peer signs what a record may not hold, an unknown field among it."""
    with pytest.raises(MalformedError, match=reason):
        open_envelope(packed(**changes), Receipt)


def test_too_large_is_refused_before_anything_is_decoded():
    """Megabytes of nested arrays under a small record's name."""
    with pytest.raises(MalformedError, match="receipt of 2049 bytes; at most 1024"):
        open_envelope(bytes(2049), Receipt)
    with pytest.raises(MalformedError, match="at most"):
        open_envelope(signed(payload=bytes(Receipt.MAX_BYTES + 1000)), Receipt)
    with pytest.raises(MalformedError, match="an envelope of"):
        kind_of(bytes(MAX_ENVELOPE_BYTES + 1))


def test_no_record_outgrows_the_envelope():
    def every(kind):
        return [kind, *(item for child in kind.__subclasses__() for item in every(child))]

    kinds = every(Record)
    assert len(kinds) > 10
    assert all(kind.MAX_BYTES + 1024 <= MAX_ENVELOPE_BYTES for kind in kinds)


def opens(data, kind):
    try:
        return open_envelope(data, kind)
    except ProtocolError:
        return None


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data):
    assert opens(data, Receipt) is None
    with contextlib.suppress(ProtocolError):
        kind_of(data)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_any_signed_payload_is_a_record_or_refused(payload):
    opened = opens(signed(payload=payload), Receipt)
    assert opened is None or isinstance(opened.record, Receipt)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_is_refused_or_the_same_statement(position, mask):
    data = bytearray(DATA)
    data[position % len(DATA)] ^= mask
    opened = opens(bytes(data), Receipt)
    assert opened is None or opened.id == open_envelope(DATA, Receipt).id


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*Submission.__struct_fields__, "other"]), values))
def test_any_structured_payload_is_a_record_or_refused(fields):
    opens(signed(payload=msgspec.msgpack.encode(fields), kind="submission"), Submission)
    opens(signed(payload=msgspec.msgpack.encode(fields), kind="manifest"), Manifest)


def test_require_author_names_who_may_sign():
    opened: Signed[Receipt] = open_envelope(DATA, Receipt)
    assert opened.require_author(BOB.peer_id, ALICE.peer_id) is opened
    with pytest.raises(WrongAuthorError, match=f"signed by {ALICE.peer_id.short}; only {BOB.peer_id.short} may"):
        opened.require_author(BOB.peer_id)
    with pytest.raises(WrongAuthorError, match="only nobody"):
        opened.require_author()


def test_a_record_is_never_larger_than_a_dht_value_allows():
    assert len(seal(make_manifest(), ALICE)) < Manifest.MAX_BYTES
