"""Patches between shards: lossless for every bit pattern, bounded for every patch, and the same bytes for ever."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ChecksumError, MalformedError, ProtocolError
from protocol.patch import (
    MAX_SEGMENTS,
    NO_BASE,
    STEPS,
    Run,
    apply_patch,
    make_patch,
    max_patch_bytes,
    pack_shard,
    unpack_shard,
)

GOLDEN = Path(__file__).parent / "golden"
EVERY_PATTERN = np.arange(1 << 16, dtype="<u2")


def digest(data: bytes | bytearray) -> bytes:
    return hashlib.sha256(data).digest()


def make(base: bytes, target: bytes, runs: Sequence[Run]) -> bytes | None:
    return make_patch(base, target, runs, base_sha256=digest(base), target_sha256=digest(target))


def apply(patch: bytes, base: bytes, target: bytes) -> bytearray:
    return apply_patch(patch, base, base_sha256=digest(base), target_sha256=digest(target))


def made(base: bytes, target: bytes, runs: Sequence[Run]) -> bytes:
    patch = make(base, target, runs)
    assert patch is not None
    return patch


def weights(count: int, *, seed: int = 0) -> np.ndarray:
    """bf16 patterns as a model's weights have them."""
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")


def moved(values: np.ndarray, at: Sequence[int], by: int = 1) -> np.ndarray:
    changed = values.copy()
    changed[list(at)] += np.uint16(by)
    return changed


def steps_patch(base: bytes, target: bytes, *, changes: int, streams: Sequence[tuple[int, bytes]]) -> bytes:
    """A patch of one bf16 segment that says what the caller likes; a stream is (method, bytes)."""
    header = struct.pack("<4s32s32sIH", b"IPT1", digest(base), digest(target), len(base), 1)
    segment = struct.pack("<BII", STEPS, len(base), changes)
    return header + segment + b"".join(struct.pack("<BI", method, len(data)) + data for method, data in streams)


# ------------------------------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_a_sparse_change_of_bf16_weights_comes_back_and_is_small(offset: int) -> None:
    old = weights(200_000)
    at = np.random.default_rng(1).choice(old.size, old.size // 100, replace=False)
    head = bytes(range(offset))
    base, target = head + old.tobytes(), head + moved(old, at).tobytes()
    runs = [Run(1, offset)] * bool(offset) + [Run(STEPS, 2 * old.size)]
    patch = made(base, target, runs)
    assert apply(patch, base, target) == target
    assert len(patch) * 100 < len(target)


def test_every_bf16_pattern_can_become_every_kind_of_other_pattern() -> None:
    """Zeros of both signs, infinities, NaN payloads, jumps over the whole range: bits, not numbers, are kept."""
    rng = np.random.default_rng(2)
    for new in (EVERY_PATTERN[::-1], EVERY_PATTERN ^ 0x8000, rng.permutation(EVERY_PATTERN), EVERY_PATTERN + 1):
        old = np.concatenate([EVERY_PATTERN, np.zeros(1 << 18, "<u2")])
        target = np.concatenate([new, np.zeros(1 << 18, "<u2")]).astype("<u2").tobytes()
        patch = made(old.tobytes(), target, [Run(STEPS, len(target))])
        assert apply(patch, old.tobytes(), target) == target


def test_changes_that_leave_the_low_byte_alone_are_found() -> None:
    old = weights(5000)
    target = moved(old, range(0, 5000, 50), by=0x100).tobytes()
    assert apply(made(old.tobytes(), target, [Run(STEPS, 10_000)]), old.tobytes(), target) == target


def test_minus_zero_and_plus_zero_are_two_values() -> None:
    old = np.zeros(1000, "<u2")
    target = moved(old, [3, 999], by=0x8000).tobytes()
    assert apply(made(old.tobytes(), target, [Run(STEPS, 2000)]), old.tobytes(), target) == target


@pytest.mark.parametrize("gap", [0, 1, 0xFE, 0xFF, 0x100, 0xFFFD, 0xFFFE, 0xFFFF, 0x10000, 0x10001, 0x1FFFF, 0x40000])
def test_gaps_on_both_sides_of_every_width(gap: int) -> None:
    old = weights(0x50000)
    for first in (0, 5):
        at = [first, first + gap + 1, old.size - 1]
        target = moved(old, at).tobytes()
        assert apply(made(old.tobytes(), target, [Run(STEPS, 2 * old.size)]), old.tobytes(), target) == target


@pytest.mark.parametrize("step", [1, 126, 127, 128, 129, 0x7F00, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF])
def test_steps_on_both_sides_of_every_width(step: int) -> None:
    old = weights(4000)
    target = moved(old, range(0, 4000, 40), by=step).tobytes()
    assert apply(made(old.tobytes(), target, [Run(STEPS, 8000)]), old.tobytes(), target) == target


def test_nothing_changed_is_a_patch_too() -> None:
    base = weights(1000).tobytes()
    patch = made(base, base, [Run(STEPS, len(base))])
    assert apply(patch, base, base) == base
    assert len(patch) < 120


def test_the_base_stays_as_it_was() -> None:
    old = weights(1000)
    base, target = bytearray(old.tobytes()), moved(old, [1, 2]).tobytes()
    before = bytes(base)
    result = apply_patch(
        made(before, target, [Run(STEPS, 2000)]), base, base_sha256=digest(base), target_sha256=digest(target)
    )
    assert base == before
    assert result == target


@given(data=st.data(), kind=st.sampled_from([1, 2, 4, 8, STEPS]), count=st.integers(64, 300))
def test_any_two_shards_of_any_kind(data: st.DataObject, kind: int, count: int) -> None:
    width = 2 if kind == STEPS else kind
    size = width * count
    base = data.draw(st.binary(min_size=size, max_size=size))
    target = bytearray(base)
    for at in data.draw(st.lists(st.integers(0, size - 1), max_size=5)):
        target[at] ^= data.draw(st.integers(0, 255))
    patch = make(base, bytes(target), [Run(kind, size)])
    if patch is not None:
        assert len(patch) <= size // 2
        assert apply(patch, base, bytes(target)) == target


def test_float32_weights_go_by_xor_of_byte_planes() -> None:
    old = np.random.default_rng(3).normal(0, 0.02, 50_000).astype("<f4")
    target = (old + np.float32(2e-7)).astype("<f4").tobytes()
    patch = made(old.tobytes(), target, [Run(4, len(target))])
    assert apply(patch, old.tobytes(), target) == target
    assert len(patch) < 0.4 * len(target)


def test_a_shard_of_many_kinds() -> None:
    base = np.random.default_rng(4).bytes(9 + 2000 + 4000 + 800 + 3)
    target = bytearray(base)
    for at in (0, 8, 9, 2008, 2009, 6008, 6009, len(base) - 1):
        target[at] ^= 0x41
    runs = [Run(1, 9), Run(STEPS, 2000), Run(4, 4000), Run(8, 800), Run(1, 3)]
    assert apply(made(base, bytes(target), runs), base, bytes(target)) == target


def test_too_many_kinds_are_taken_as_bytes() -> None:
    base = bytes(4 * (MAX_SEGMENTS + 1))
    runs = [Run(1 if index % 2 else 2, 4) for index in range(MAX_SEGMENTS + 1)]
    assert apply(made(base, base, runs), base, base) == base


def test_a_patch_of_more_than_half_the_shard_is_not_made() -> None:
    base, target = np.random.default_rng(5).bytes(4000), np.random.default_rng(6).bytes(4000)
    assert make(base, target, [Run(1, 4000)]) is None
    assert make(base, target, [Run(STEPS, 4000)]) is None


def test_wrong_use_is_told_from_wrong_bytes() -> None:
    with pytest.raises(ValueError, match="between 4 and 6"):
        make(b"base", b"target", [Run(1, 4)])
    for runs in ([Run(1, 3)], [Run(3, 4)], [Run(8, 4)], [Run(1, 4), Run(1, 0)]):
        with pytest.raises(ValueError, match="run"):
            make(b"base", b"next", runs)


# --------------------------------------------------------------------------------------------------------------- packed


def test_a_packed_shard_of_bf16_weights_is_smaller_by_a_third() -> None:
    shard = weights(100_000).tobytes()
    packed = pack_shard(shard, [Run(STEPS, len(shard))], target_sha256=digest(shard))
    assert packed is not None
    assert len(packed) * 1.4 < len(shard)
    assert unpack_shard(packed, length=len(shard), target_sha256=digest(shard)) == shard


def test_noise_is_not_packed() -> None:
    shard = np.random.default_rng(7).bytes(10_000)
    assert pack_shard(shard, [Run(4, 10_000)], target_sha256=digest(shard)) is None


def test_a_packed_shard_is_no_patch_and_a_patch_no_packed_shard() -> None:
    shard = bytes(4000)
    packed = pack_shard(shard, [Run(2, 4000)], target_sha256=digest(shard))
    patch = made(shard, shard, [Run(STEPS, 4000)])
    assert packed is not None
    with pytest.raises(MalformedError, match="instead of what was asked for"):
        apply(packed, shard, shard)
    with pytest.raises(MalformedError, match="instead of what was asked for"):
        unpack_shard(patch, length=4000, target_sha256=digest(shard))


# -------------------------------------------------------------------------------------------------------------- hostile


BASE = weights(400).tobytes()
TARGET = moved(weights(400), [0, 7, 399]).tobytes()
PATCH = made(BASE, TARGET, [Run(STEPS, 800)])


@settings(max_examples=300)
@given(patch=st.binary(max_size=200))
def test_any_bytes_are_refused_by_name(patch: bytes) -> None:
    with pytest.raises(ProtocolError):
        apply(patch, BASE, TARGET)
    with pytest.raises(ProtocolError):
        unpack_shard(patch, length=len(TARGET), target_sha256=digest(TARGET))


@settings(max_examples=500)
@given(at=st.integers(0, len(PATCH) - 1), flip=st.integers(1, 255), cut=st.integers(0, len(PATCH)))
def test_a_damaged_patch_gives_the_target_or_a_named_error(at: int, flip: int, cut: int) -> None:
    damaged = bytearray(PATCH)
    damaged[at] ^= flip
    for patch in (bytes(damaged), PATCH[:cut], PATCH + PATCH[:cut]):
        try:
            assert apply(patch, BASE, TARGET) == TARGET
        except ProtocolError:
            continue


@settings(max_examples=300)
@given(
    changes=st.integers(0, 450),
    streams=st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.binary(max_size=40)), min_size=5, max_size=5),
)
def test_any_streams_give_a_named_error_or_the_target(changes: int, streams: list[tuple[int, bytes]]) -> None:
    patch = steps_patch(BASE, TARGET, changes=changes, streams=streams)
    with pytest.raises(ProtocolError):
        apply(patch, BASE, TARGET)


def test_an_index_beyond_the_end_is_refused_before_anything_is_written_there() -> None:
    """Attack: gaps that add up to a place outside of the shard, by a plain gap and by an escaped one."""
    plain = [(0, b"\x90"), (0, b"\x01"), (0, b""), (0, b"\x02"), (0, b"")]
    wide = [(0, b"\xff"), (0, b"\xff"), (0, b"\xff\xff\xff\xff"), (0, b"\x02"), (0, b"")]
    for streams in (plain, wide):
        with pytest.raises(MalformedError, match="changes value"):
            apply(steps_patch(BASE, TARGET, changes=1, streams=streams), BASE, TARGET)


def test_more_changes_than_values_are_refused_before_anything_is_decompressed() -> None:
    """Attack: four billion changes in a few bytes."""
    with pytest.raises(MalformedError, match="4294967295 changes in 400 values"):
        apply(steps_patch(BASE, TARGET, changes=0xFFFFFFFF, streams=[(1, b"")] * 5), BASE, TARGET)


def test_a_decompression_bomb_costs_no_more_than_the_shard() -> None:
    """Attack: a frame of a gibibyte of zeros where a stream of 400 bytes is due."""
    shard = bytes(1 << 20)
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    streams = [(1, bomb), (0, b""), (0, b""), (0, b""), (0, b"")]
    patch = steps_patch(shard, shard, changes=400, streams=streams)
    assert len(patch) <= max_patch_bytes(len(shard))
    tracemalloc.start()
    with pytest.raises(MalformedError, match="does not decompress to 400 bytes"):
        apply(patch, shard, shard)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(400)),
        zstandard.ZstdCompressor().compress(bytes(400)) + b"x",
        zstandard.ZstdCompressor().compress(bytes(399)),
        zstandard.ZstdCompressor().compress(os.urandom(400))[:-1],
        b"(\xb5/\xfd",
    ],
    ids=["size not stated", "more than a frame", "another size", "cut short", "no frame"],
)
def test_a_frame_that_is_not_the_stream_is_refused(frame: bytes) -> None:
    """Attack: a frame whose size only decompressing would tell, or with something hidden behind it."""
    streams = [(1, frame), (0, b""), (0, b""), (0, b""), (0, b"")]
    shard = bytes(1 << 20)
    with pytest.raises(MalformedError, match="does not decompress to 400 bytes"):
        apply(steps_patch(shard, shard, changes=400, streams=streams), shard, shard)


def test_patches_take_no_pyarrow() -> None:
    """It would be 25 MB in every process that only moves files."""
    program = (
        "import sys; from protocol.patch import pack_shard, Run; "
        "pack_shard(bytes(99), [Run(1, 99)], target_sha256=b''); "
        "sys.exit('pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_patch_for_another_base_target_or_length_is_refused() -> None:
    """Attack, or mix-up: a patch from v0 to v2 for a client that holds v1."""
    other = moved(weights(400), [1]).tobytes()
    with pytest.raises(MalformedError, match="instead of what was asked for"):
        apply(PATCH, other, TARGET)
    with pytest.raises(MalformedError, match="instead of what was asked for"):
        apply(PATCH, BASE, other)
    with pytest.raises(MalformedError, match="format or length"):
        apply(PATCH, BASE + BASE, TARGET)


def test_a_patch_that_leads_elsewhere_is_caught_by_the_hash() -> None:
    """Attack: the right hashes in the header, one step too many in a weight."""
    lie = moved(weights(400), [0, 7, 398]).tobytes()
    patch = bytearray(made(BASE, lie, [Run(STEPS, 800)]))
    patch[36:68] = digest(TARGET)
    with pytest.raises(ChecksumError, match="gives other bytes"):
        apply(bytes(patch), BASE, TARGET)


@pytest.mark.parametrize(("kind", "size"), [(0, 800), (3, 800), (17, 800), (STEPS, 0), (STEPS, 799), (STEPS, 802)])
def test_segments_of_unknown_kind_or_size_are_refused(kind: int, size: int) -> None:
    patch = struct.pack("<4s32s32sIHBII", b"IPT1", digest(BASE), digest(TARGET), 800, 1, kind, size, 0) + bytes(25)
    with pytest.raises(MalformedError, match="segment of kind"):
        apply(patch, BASE, TARGET)


def test_a_patch_larger_than_half_the_shard_is_refused_unread() -> None:
    with pytest.raises(MalformedError, match="a patch of 401 bytes"):
        apply(bytes(401), BASE, TARGET)
    with pytest.raises(MalformedError, match="a packed shard of 800 bytes"):
        unpack_shard(bytes(800), length=800, target_sha256=NO_BASE)


# --------------------------------------------------------------------------------------------------------------- golden


def golden(name: str) -> bytes:
    return (GOLDEN / f"patch-{name}").read_bytes()


def test_golden_patch_is_made_byte_for_byte() -> None:
    """Streams so short that none is compressed: nothing depends on a zstd library's version."""
    base, target = golden("small.base"), golden("small.target")
    patch = made(base, target, [Run(1, 5), Run(STEPS, 400), Run(4, 16), Run(1, 3)])
    assert patch == golden("small.patch")
    assert apply(patch, base, target) == target


def golden_shards() -> tuple[bytes, bytes]:
    """70,000 values of four exponents: some hundred change, one its sign, one after a gap beyond 16 bits."""
    index = np.arange(70_000)
    old = (0x3B80 + (index * index // 7 % 4) * 0x80 + index * 37 % 97 + index % 2 * 0x8000).astype("<u2")
    new = moved(moved(old, range(0, 1800, 6)), range(3, 1000, 11), by=0xFFFE)
    new[1001] ^= 0x8000
    new[69_000] += 1000
    return old.tobytes(), new.tobytes()


def test_golden_patch_with_compressed_streams_is_understood() -> None:
    base, target = golden_shards()
    assert apply(golden("zstd.patch"), base, target) == target


def test_golden_packed_shard_is_understood() -> None:
    _, target = golden_shards()
    assert unpack_shard(golden("zstd.packed"), length=len(target), target_sha256=digest(target)) == target
