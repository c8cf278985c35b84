"""Checkpoint manifests: shard arithmetic, and every way in which a manifest can lie."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.checkpoint import (
    CheckpointRules,
    check_names,
    content_digest,
    extents,
    open_checkpoint,
    shard_count,
    shard_range,
    shard_ranges,
)
from protocol.envelope import open_envelope, seal
from protocol.errors import (
    ChecksumError,
    MalformedError,
    ProtocolError,
    SignatureError,
    WrongAuthorError,
    WrongRunError,
)
from protocol.identity import Identity
from protocol.records import CheckpointFile, CheckpointManifest

TRAINER = Identity.from_phrase("trainer")
MALLORY = Identity.from_phrase("mallory")
RUN_ID = b"r" * 32
RULES = CheckpointRules(RUN_ID, TRAINER.peer_id, 4096, total_steps=10, max_bytes=1 << 20)


def file(name, size):
    return CheckpointFile(name=name, size=size, sha256=bytes(32))


def manifest(**changes):
    record = CheckpointManifest(
        run_id=RUN_ID,
        step=3,
        issued_at_ms=1,
        shard_bytes=4096,
        files=(file("config.json", 100), file("model.safetensors", 8000)),
        shards=(bytes(32), bytes(32)),
        sha256=bytes(32),
    )
    changed = msgspec.structs.replace(record, **changes)
    return changed if "sha256" in changes else msgspec.structs.replace(changed, sha256=content_digest(changed.shards))


def signed(record, identity=TRAINER):
    return open_envelope(seal(record, identity), CheckpointManifest)


@given(st.integers(1, 5000), st.integers(1, 700))
def test_shards_cover_the_stream_without_gap_or_overlap(total, size):
    ranges = list(shard_ranges(total, size))
    assert len(ranges) == shard_count(total, size)
    assert [position for part in ranges for position in part] == list(range(total))
    assert ranges == [shard_range(index, total, shard_bytes=size) for index in range(len(ranges))]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 40))
def test_extents_give_the_bytes_of_the_files_laid_end_to_end(sizes, shard):
    files = [file(f"f{index}", size) for index, size in enumerate(sizes)]
    bodies = {each.name: bytes((index * 7 + at) % 256 for at in range(each.size)) for index, each in enumerate(files)}
    stream = b"".join(bodies.values())
    for part in shard_ranges(len(stream), shard):
        pieces = [bodies[name][offset : offset + length] for name, offset, length in extents(files, part)]
        assert b"".join(pieces) == stream[part.start : part.stop]
        assert all(pieces)


@pytest.mark.parametrize("index", [-1, 2, 10**9])
def test_a_shard_that_is_not_there_is_malformed(index):
    with pytest.raises(MalformedError, match="there are 2"):
        shard_range(index, 8100, shard_bytes=4096)


def test_a_good_manifest_passes():
    good = signed(manifest())
    RULES.check(good)
    RULES.check(good, step=3)
    assert open_checkpoint(good.data, good.id) == good


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "a/b", "a\\b", ".hidden", "..", "a\n", "a\0b", "", "x" * 129, "é", "-rf"],
)
def test_a_file_name_cannot_leave_the_directory(name):
    """The trainer's key is stolen, and a manifest tries to write outside of the checkpoint's directory."""
    with pytest.raises(MalformedError):
        RULES.check(signed(manifest(files=(file(name, 100), file("model.safetensors", 8000)))))
    with pytest.raises(MalformedError, match="unsafe"):
        check_names([name])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"files": (file("a", 100), file("A", 8000))}, "twice"),
        ({"files": (file("a", 0),), "shards": (bytes(32),)}, "of 0 bytes"),
        ({"files": (file("a", 2**53),)}, "of 9007199254740992 bytes"),
        ({"files": tuple(file(f"f{n}", 2**53) for n in range(1024))}, "this node takes"),
        ({"files": (file("a", (1 << 20) + 1),), "shards": (bytes(32),) * 257}, "this node takes"),
        ({"shards": (bytes(32),)}, "1 shard hashes"),
        ({"shards": (bytes(32),) * 3}, "3 shard hashes"),
        ({"shard_bytes": 1}, "the run's have 4096"),
        ({"shard_bytes": 8192, "shards": (bytes(32),)}, "the run's have 4096"),
        ({"step": 11}, "run of 10 steps"),
        ({"sha256": bytes(32)}, "another content"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(changes, match):
    """A manifest promises more than there is, to fill the disk or to divide by nothing."""
    with pytest.raises(MalformedError, match=match):
        RULES.check(signed(manifest(**changes)))


def test_a_rolled_back_manifest_is_refused():
    """An old checkpoint is named where a newer one was announced."""
    with pytest.raises(MalformedError, match="is of step 3, not 4"):
        RULES.check(signed(manifest()), step=4)


def test_another_signer_or_another_run_is_refused():
    """Mallory signs a manifest of her own; the trainer's manifest of another run is replayed."""
    with pytest.raises(WrongAuthorError):
        RULES.check(signed(manifest(), MALLORY))
    with pytest.raises(WrongRunError):
        RULES.check(signed(manifest(run_id=b"x" * 32)))


def test_what_was_asked_for_by_id_is_what_must_come():
    """A relay answers with another manifest that the trainer did sign, or with a damaged one."""
    good, other = signed(manifest()), signed(manifest(step=2))
    with pytest.raises(ChecksumError):
        open_checkpoint(other.data, good.id)
    with pytest.raises(SignatureError):
        open_checkpoint(good.data[:-1] + bytes([good.data[-1] ^ 1]), good.id)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_by_name(data):
    with pytest.raises(ProtocolError):
        open_checkpoint(data, bytes(32))
