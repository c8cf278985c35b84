import math

import msgspec
import pytest
from factories import OPERATOR, VALIDATOR, make_manifest, make_tolerance
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.constants import MAX_DHT_VALUE_BYTES, MAX_SHARDS
from protocol.envelope import Record, open_envelope, seal
from protocol.errors import MalformedError, ProtocolError
from protocol.records import (
    Admission,
    AdmissionSpec,
    Appeal,
    Batch,
    CheckpointFile,
    CheckpointManifest,
    CheckpointPart,
    CheckpointPlan,
    CheckResult,
    Draw,
    Eviction,
    Head,
    Heartbeat,
    Hello,
    Invite,
    Manifest,
    OriginNotice,
    PlannedFile,
    Receipt,
    Reinstatement,
    RelayAdvert,
    RunPointer,
    Submission,
    Tolerance,
    Trained,
    Verdict,
)

KEY = VALIDATOR.peer_id.public_key
D = b"d" * 32

EXAMPLES: list[Record] = [
    make_manifest(),
    Head(
        run_id=D, sequence=3, previous_sequence=2, issued_at_ms=1, step=2, collecting=True, checkpoint_step=2,
        checkpoint=D, oldest_checkpoint_step=1, ledger_length=9, ledger_tip=D, finished=False,
    ),
    RunPointer(name="test", sequence=1, issued_at_ms=1, valid_until_ms=2, manifest=b"m"),
    RelayAdvert(
        run=D, sequence=1, issued_at_ms=1, valid_until_ms=2, multiaddrs=("/ip4/127.0.0.1/tcp/1",),
        http_url="https://127.0.0.1:8080", tls_fingerprint=D, software="1.0",
    ),
    OriginNotice(
        run_id=D, relay=KEY, issued_at_ms=1, http_url="https://[::1]:8080/x", tls_fingerprint=D, token="t" * 16,
    ),
    Hello(run=D, relay=KEY, nonce=b"n" * 56),
    CheckpointPlan(
        run_id=D, step=1, issued_at_ms=1, shard_bytes=4096,
        files=(PlannedFile(name="config.json", size=10), PlannedFile(name="a.st", size=5)),
    ),
    CheckpointPart(plan=D, number=0, first_shard=0, shards=(D, D)),
    CheckpointManifest(
        run_id=D, step=1, issued_at_ms=1, shard_bytes=4096, sha256=D, shards=(D, D),
        files=(CheckpointFile(name="config.json", size=10, sha256=D), CheckpointFile(name="a.st", size=5, sha256=D)),
    ),
    Submission(
        run_id=D, step=1, index=0, checkpoint_step=1, checkpoint=D, sha256=D, size=1, rollouts=4, output_tokens=9,
        prompts=D, engine="torch", dtype="float32", software="1.0", issued_at_ms=1,
    ),
    Receipt(run_id=D, submission=D, head_sequence=1, received_at_ms=1),
    Verdict(
        run_id=D, submission=D, contributor=KEY, step=1, outcome="reject", hard=True, reason="forged proof",
        checks=(CheckResult(name="toploc", outcome="fail", detail="x", numbers={"mismatches": 128.0}),),
        draw=Draw(drawn=True, rate=0.25, why="drawn", beacon=b"head", receipt=b"receipt"),
        mean_reward=0.5, engine="torch", dtype="float32", software="1.0", head_sequence=1, appeal=D, issued_at_ms=1,
    ),
    Batch(run_id=D, step=1, submissions=(D,), issued_at_ms=1, ended="whole", silent=b""),
    Trained(run_id=D, step=1, checkpoint=D, mean_reward=0.5, metrics={"loss": -0.1}, issued_at_ms=1),
    Eviction(run_id=D, contributor=KEY, verdict=D, reason="forged proof", issued_at_ms=1),
    Admission(run_id=D, protocol=1, software="1.0", nonce=b"n" * 8, invite=b"invite", issued_at_ms=1),
    Invite(run_id=D, token=b"t" * 16, valid_until_ms=2),
    Heartbeat(
        run_id=D, role="inference", instance=b"i" * 16, sequence=1, software="1.0", protocol=1, checkpoint_step=None,
        tokens_per_s=10.5, activity="waits for a policy", issued_at_ms=1,
    ),
    Appeal(run_id=D, submission=D, verdict=D, reason="honest", issued_at_ms=1),
    Reinstatement(run_id=D, contributor=KEY, appeal=D, verdict=D, reason="accepted again", issued_at_ms=1),
]  # fmt: skip
BY_KIND = {record.KIND: record for record in EXAMPLES}


def refused(kind, because, /, **changes):
    """Open the example with these changes: it must fail for this reason. Signing checks nothing, as a hostile node."""
    with pytest.raises(MalformedError, match=because):
        open_envelope(seal(msgspec.structs.replace(BY_KIND[kind], **changes), OPERATOR), type(BY_KIND[kind]))


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.KIND)
def test_every_record_survives(record):
    assert open_envelope(seal(record, OPERATOR), type(record)).record == record


def test_kinds_are_distinct():
    assert len(BY_KIND) == len(EXAMPLES)


def test_golden_payload_of_a_head():
    """Field names and types on the wire. A change here is another protocol version."""
    assert msgspec.msgpack.encode(BY_KIND["head"]).hex() == (
        "8ca672756e5f6964c4206464646464646464646464646464646464646464646464646464646464646464a87365717565"
        "6e636503b170726576696f75735f73657175656e636502ac6973737565645f61745f6d7301a47374657002aa636f6c6c"
        "656374696e67c3af636865636b706f696e745f7374657002aa636865636b706f696e74c4206464646464646464646464"
        "646464646464646464646464646464646464646464b66f6c646573745f636865636b706f696e745f7374657001ad6c65"
        "646765725f6c656e67746809aa6c65646765725f746970c4206464646464646464646464646464646464646464646464"
        "646464646464646464a866696e6973686564c2"
    )


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.KIND)
def test_unknown_and_missing_fields_are_refused(record):
    fields = msgspec.structs.asdict(record)
    decode = msgspec.msgpack.Decoder(type(record)).decode
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        decode(msgspec.msgpack.encode(fields | {"surprise": 1}))
    for name in fields:
        with pytest.raises(msgspec.ValidationError, match=name):
            decode(msgspec.msgpack.encode({key: value for key, value in fields.items() if key != name}))


def floats_in(kind):
    """Every type of number with a fraction that is somewhere in a record."""
    if isinstance(kind, msgspec.inspect.FloatType):
        yield kind
    for name in kind.__struct_fields__ if isinstance(kind, msgspec.inspect.Type) else ():
        inner = getattr(kind, name)
        for each in inner if isinstance(inner, tuple) else (inner,):
            yield from floats_in(each.type if isinstance(each, msgspec.inspect.Field) else each)


def test_every_float_of_a_record_has_two_bounds():
    """A bound refuses NaN as well: nothing that is not a number gets into a ledger, whichever field is added next."""
    found = {record.KIND: list(floats_in(msgspec.inspect.type_info(type(record)))) for record in EXAMPLES}
    assert [len(found[kind]) for kind in ("trained", "verdict", "heartbeat")] == [2, 4, 1]
    for kind, floats in found.items():
        for one in floats:
            assert one.ge is not None or one.gt is not None, kind
            assert one.le is not None or one.lt is not None, kind


@given(value=st.floats())
def test_numbers_in_the_ledger_are_finite(value):
    """NaN and infinity make every sum that they get into worthless, and no JSON can hold them."""
    trained, verdict = BY_KIND["trained"], BY_KIND["verdict"]
    check = CheckResult(name="toploc", outcome="pass", numbers={"x": value})
    for record, changes in (
        (trained, {"mean_reward": value}),
        (trained, {"metrics": {"loss": value}}),
        (verdict, {"mean_reward": value}),
        (verdict, {"checks": (check,)}),
        (verdict, {"checks": (msgspec.structs.replace(check, numbers={}, limits={"x": value}),)}),
    ):
        data = seal(msgspec.structs.replace(record, **changes), OPERATOR)
        if math.isfinite(value):
            open_envelope(data, type(record))
        else:
            with pytest.raises(MalformedError):
                open_envelope(data, type(record))


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.KIND)
def test_records_are_immutable(record):
    with pytest.raises(AttributeError):
        setattr(record, record.__struct_fields__[0], None)


@pytest.mark.parametrize("name", ["", "UPPER", "-dash", "a b", "new\n", "a" * 65, "../up", "é"], ids=repr)
def test_names_are_plain(name):
    refused("manifest", "name", name=name)
    refused("run-pointer", "name", name=name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/etc/passwd", "a\\b", "a\0b", "new\n", "a" * 129], ids=repr
)
def test_checkpoint_files_stay_in_their_directory(name):
    """A trainer's manifest names a file outside the checkpoint's directory."""
    refused("checkpoint", "name", files=(CheckpointFile(name=name, size=1, sha256=D),))


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://host", "file:///etc/passwd", "https://", "https://a b", "https://host\r\nX: y", "https://host\n"),
        "http://host",
    ],
    ids=repr,
)
def test_urls_are_https_without_white_space(url):
    """A relay advertises a URL that reads local files, smuggles a header, or has tokens sent in clear."""
    refused("relay-advert", "http_url", http_url=url)
    refused("origin-notice", "http_url", http_url=url)


@pytest.mark.parametrize("field", [name for name in Tolerance.__struct_fields__ if name != "max_exponent_mismatches"])
@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_thresholds_are_numbers(field, bad):
    """Every measurement passes a threshold that is not a number."""
    refused("manifest", field, tolerances={"float32": make_tolerance(**{field: bad})})


@pytest.mark.parametrize("dtypes", [[], ["float 32"], [""], ["a", "b", "c", "d", "e"]])
def test_tolerances_are_for_some_number_formats(dtypes):
    refused("manifest", "tolerances", tolerances=dict.fromkeys(dtypes, make_tolerance()))


@pytest.mark.parametrize("floor", [0.0, -0.5, 1.5, math.nan])
def test_nobody_is_ever_wholly_unchecked(floor):
    """An operator's manifest sets a floor of no checks at all."""
    refused("manifest", "floor", checks=msgspec.structs.replace(BY_KIND["manifest"].checks, floor=floor))


@pytest.mark.parametrize("temperature", [0.0, -1.0, 10.5, math.nan, math.inf])
def test_temperatures_are_positive_and_finite(temperature):
    rollout = msgspec.structs.replace(BY_KIND["manifest"].rollout, temperature=temperature)
    refused("manifest", "temperature", rollout=rollout)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("manifest", {"validators": ()}),
        ("manifest", {"validators": (KEY,) * 65}),
        ("manifest", {"validators": (b"short",)}),
        ("manifest", {"quorum": 0}),
        ("manifest", {"admission": {"kind": "closed"}}),
        ("manifest", {"admission": {"work_bits": 33}}),
        ("manifest", {"admission": {"allowed": (KEY,)}}),
        ("manifest", {"admission": {"kind": "allow-list"}}),
        ("manifest", {"admission": {"kind": "allow-list", "allowed": (KEY, KEY)}}),
        ("manifest", {"credits": {"maturity_steps": -1}}),
        ("manifest", {"credits": {"maturity_steps": 1, "unit": "flops"}}),
        ("manifest", {"credits": {"maturity_steps": 1, "unit": "tokens", "parameters": 7}}),
        ("manifest", {"shard_bytes": 1}),
        ("head", {"sequence": 0}),
        ("head", {"step": -1}),
        ("head", {"step": 2**53 + 1}),
        ("head", {"ledger_tip": b""}),
        ("relay-advert", {"multiaddrs": ("/ip4/127.0.0.1",) * 9}),
        ("relay-advert", {"multiaddrs": ("m" * 257,)}),
        ("origin-notice", {"token": "short"}),
        ("checkpoint", {"files": ()}),
        ("checkpoint", {"shards": ()}),
        ("checkpoint-plan", {"files": ()}),
        ("checkpoint-plan", {"shard_bytes": 0}),
        ("checkpoint-part", {"shards": ()}),
        ("checkpoint-part", {"shards": (D,) * (MAX_SHARDS + 1)}),
        ("checkpoint-part", {"first_shard": -1}),
        ("checkpoint", {"shards": (D,) * (MAX_SHARDS + 1)}),
        ("submission", {"index": -1}),
        ("submission", {"rollouts": 0}),
        ("submission", {"engine": "e" * 65}),
        ("verdict", {"outcome": "maybe"}),
        ("verdict", {"reason": "r" * 1025}),
        ("verdict", {"draw": None}),
        ("verdict", {"checks": (BY_KIND["verdict"].checks[0],) * 33}),
        ("batch", {"submissions": ()}),
        ("trained", {"metrics": {str(n): 0.0 for n in range(65)}}),
        ("eviction", {"verdict": D + D}),
        ("admission", {"nonce": b"short"}),
        ("admission", {"nonce": b"n" * 33}),
        ("admission", {"invite": b"i" * 1025}),
        ("admission", {"protocol": 0}),
        ("invite", {"token": b"t" * 15}),
        ("heartbeat", {"instance": b"i"}),
        ("heartbeat", {"role": "visitor"}),
        ("heartbeat", {"tokens_per_s": math.nan}),
        ("heartbeat", {"tokens_per_s": math.inf}),
        ("heartbeat", {"activity": "a" * 129}),
        ("heartbeat", {"sequence": 0}),
        ("appeal", {"reason": "r" * 1025}),
        ("verdict", {"appeal": D + D}),
        ("reinstatement", {"appeal": b""}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bounds_are_kept(kind, changes):
    refused(kind, next(iter(changes)), **changes)


def test_the_largest_of_each_bounded_record_fits_its_envelope():
    """What a record's own bounds allow must not be refused for its size."""
    policy = msgspec.structs.replace(BY_KIND["checkpoint"], shards=(D,) * MAX_SHARDS)
    assert open_envelope(seal(policy, OPERATOR), CheckpointManifest).record == policy
    batch = msgspec.structs.replace(BY_KIND["batch"], submissions=(D,) * (1 << 13))
    assert open_envelope(seal(batch, OPERATOR), Batch).record == batch
    eviction = msgspec.structs.replace(BY_KIND["eviction"], reason="\U0001f511" * 1024)
    assert open_envelope(seal(eviction, OPERATOR), Eviction).record == eviction
    formats = dict.fromkeys((letter * 16 for letter in "abcd"), make_tolerance())
    allowed = AdmissionSpec(kind="allow-list", allowed=tuple(bytes([n]) * 32 for n in range(32)), work_bits=32)
    manifest = make_manifest(name="n" * 64, validators=(KEY,) * 64, tolerances=formats, admission=allowed)
    assert open_envelope(seal(manifest, OPERATOR), Manifest).record == manifest
    for kind in ("appeal", "reinstatement"):
        record = msgspec.structs.replace(BY_KIND[kind], reason="\U0001f511" * 1024)
        assert open_envelope(seal(record, OPERATOR), type(record)).record == record


def test_a_full_run_pointer_fits_a_dht_value():
    formats = dict.fromkeys((letter * 16 for letter in "abcd"), make_tolerance())
    allowed = AdmissionSpec(kind="allow-list", allowed=tuple(bytes([n]) * 32 for n in range(32)))
    record = make_manifest(name="n" * 64, validators=(KEY,) * 64, tolerances=formats, admission=allowed)
    manifest = seal(record, OPERATOR)
    pointer = msgspec.structs.replace(BY_KIND["run-pointer"], manifest=manifest)
    assert len(seal(pointer, OPERATOR)) <= MAX_DHT_VALUE_BYTES
    assert RunPointer.MAX_BYTES + 1024 <= MAX_DHT_VALUE_BYTES


def test_derived_values():
    manifest = BY_KIND["manifest"]
    assert manifest.trainer_id == OPERATOR.peer_id
    assert manifest.validator_ids == (VALIDATOR.peer_id,)
    assert manifest.rollouts_per_submission == 4
    assert BY_KIND["checkpoint"].total_bytes == 15


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_one_field_of_another_type_is_refused_or_valid(record, data):
    name = data.draw(st.sampled_from(record.__struct_fields__))
    value = data.draw(st.none() | st.booleans() | st.integers(-5, 2**64 - 1) | st.floats() | st.text() | st.binary())
    try:
        opened = open_envelope(seal(msgspec.structs.replace(record, **{name: value}), OPERATOR), type(record))
    except ProtocolError:
        return
    assert isinstance(opened.record, type(record))
