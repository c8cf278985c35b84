"""Patches between two versions of a checkpoint shard: lossless, bound to the hashes of both, small if little changed.

A patch covers its shard in segments. In a segment of bf16 weights it lists the changed values: gaps between their
indices and signed distances in bf16 order. In any other it holds the XOR of both versions, split in byte planes. A
packed shard is a patch against nothing, so that whole shards travel smaller too. Leaves out which bytes are of which
type (protocol.tensor_runs) and where patches come from (p2p.shardcast.patches). docs/protocol.md has the format.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.errors import ChecksumError, MalformedError

Data = bytes | bytearray | memoryview
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]

MAGIC: Final = b"IPT1"
NO_BASE: Final = bytes(32)
"""In place of the base's hash in a packed shard."""
STEPS: Final = 16
"""Kind of a segment of bf16 values; the other kinds are widths of the values whose XOR is split in byte planes."""
WIDTHS: Final = (1, 2, 4, 8)
MAX_SEGMENTS: Final = 1024
MAX_SHARE: Final = 0.5
"""A patch larger than this part of its shard is not made: the shard travels whole."""

_HEADER: Final = struct.Struct("<4s32s32sIH")
_SEGMENT: Final = struct.Struct("<BII")
_STREAM: Final = struct.Struct("<BI")
_STORED, _ZSTD = 0, 1
_ZSTD_LEVEL: Final = 1
_WIDE_GAP: Final = 0xFFFF
_WIDE_STEP: Final = 0xFF
_PIECE: Final = 1 << 18
"""Values that are worked on at once, so that temporaries stay in the processor's cache."""


class Run(NamedTuple):
    """Neighbouring bytes of one kind: STEPS for bf16 values, otherwise a width in bytes."""

    kind: int
    length: int


def max_patch_bytes(length: int) -> int:
    """The largest patch of a shard of `length` bytes that is made or taken."""
    return int(length * MAX_SHARE)


def make_patch(
    base: Data, target: Data, runs: Sequence[Run], *, base_sha256: bytes, target_sha256: bytes
) -> bytes | None:
    """The patch that turns `base` into `target`, of equal length; None when it would be larger than half of them.

    `runs` say what the bytes are and cover the shard; they decide about the size only, never about the result.
    """
    if len(base) != len(target):
        raise ValueError(f"a patch between {len(base)} and {len(target)} bytes")
    encode = _Encoder(runs, target, limit=max_patch_bytes(len(target)))
    return encode.patch(base, base_sha256, target_sha256)


def pack_shard(target: Data, runs: Sequence[Run], *, target_sha256: bytes) -> bytes | None:
    """A whole shard in a smaller form; None when there is none."""
    return _Encoder(runs, target, limit=len(target) - 1).patch(None, NO_BASE, target_sha256)


def apply_patch(patch: Data, base: Data, *, base_sha256: bytes, target_sha256: bytes) -> bytearray:
    """The target shard, in a buffer of its own. `base` is not changed; that its hash holds, the caller has checked.

    Raises MalformedError when the patch does not decode or is for other shards, ChecksumError when it leads elsewhere.
    Takes time and memory in proportion to the shard, whatever the patch says.
    """
    if len(patch) > max_patch_bytes(len(base)):
        raise MalformedError(f"a patch of {len(patch)} bytes for a shard of {len(base)}")
    return _decode(patch, bytearray(base), steps=True, base_sha256=base_sha256, target_sha256=target_sha256)


def unpack_shard(packed: Data, *, length: int, target_sha256: bytes) -> bytearray:
    """The shard of `length` bytes that was packed. Raises MalformedError and ChecksumError as `apply_patch` does."""
    if len(packed) >= length:
        raise MalformedError(f"a packed shard of {len(packed)} bytes for one of {length}")
    return _decode(packed, bytearray(length), steps=False, base_sha256=NO_BASE, target_sha256=target_sha256)


# ------------------------------------------------------------------------------------------------------------- encoding


class _Encoder:
    """Builds one patch; gives up as soon as it is larger than `limit`."""

    def __init__(self, runs: Sequence[Run], target: Data, *, limit: int) -> None:
        self._runs = _checked(runs, len(target))
        self._target = target
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def patch(self, base: Data | None, base_sha256: bytes, target_sha256: bytes) -> bytes | None:
        length = len(self._target)
        self._put(_HEADER.pack(MAGIC, base_sha256, target_sha256, length, len(self._runs)))
        offset = 0
        for run in self._runs:
            part = slice(offset, offset + run.length)
            self._segment(run, None if base is None else _bytes(base)[part], _bytes(self._target)[part])
            if self._size > self._limit:
                return None
            offset += run.length
        return b"".join(self._parts)

    def _put(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)

    def _segment(self, run: Run, base: U8 | None, target: U8) -> None:
        if run.kind == STEPS and base is not None:
            self._steps(_Changes(base, target), run.length)
            return
        width = 2 if run.kind == STEPS else run.kind
        self._put(_SEGMENT.pack(width, run.length, 0))
        for plane in range(width):
            self._stream(target[plane::width] if base is None else base[plane::width] ^ target[plane::width])

    def _steps(self, changes: _Changes, length: int) -> None:
        self._put(_SEGMENT.pack(STEPS, length, changes.count))
        for stream in changes.streams():
            self._stream(stream)

    def _stream(self, data: U8) -> None:
        if self._size > self._limit:
            return
        raw = np.ascontiguousarray(data)
        coded = _compressed(raw) if len(raw) else b""
        method = _ZSTD if len(coded) < len(raw) else _STORED
        coded = coded if method == _ZSTD else raw.tobytes()
        self._put(_STREAM.pack(method, len(coded)) + coded)


def _checked(runs: Sequence[Run], length: int) -> Sequence[Run]:
    if sum(run.length for run in runs) != length:
        raise ValueError(f"runs of {sum(run.length for run in runs)} bytes for a shard of {length}")
    for run in runs:
        width = 2 if run.kind == STEPS else run.kind
        if width not in WIDTHS or run.length <= 0 or run.length % width:
            raise ValueError(f"not a run: {run}")
    return runs if len(runs) <= MAX_SEGMENTS else [Run(1, length)]


class _Changes:
    """The bf16 values that differ between two runs of equal length: where, and by how many steps."""

    def __init__(self, base: U8, target: U8) -> None:
        self.count = 0
        self._gaps: list[U16] = []
        self._wide_gaps: list[U8] = []
        self._steps: list[U16] = []
        previous = -1
        for start in range(0, len(base) // 2, _PIECE):
            piece = slice(2 * start, 2 * (start + _PIECE))
            old, new = _values(base[piece]), _values(target[piece])
            at = np.flatnonzero(old != new)
            if at.size:
                self._add(np.diff(at, prepend=previous - start) - 1, _steps_between(old[at], new[at]))
                previous = start + int(at[-1])

    def _add(self, gaps: Indices, steps: U16) -> None:
        self.count += gaps.size
        self._gaps.append(np.minimum(gaps, _WIDE_GAP).astype("<u2"))
        self._wide_gaps.append(gaps[gaps >= _WIDE_GAP].astype("<u4").view(np.uint8))
        self._steps.append(steps)

    def streams(self) -> list[U8]:
        """Low and high bytes of gaps, wide gaps, steps, wide steps."""
        planes = _joined(self._gaps, "<u2").view(np.uint8).reshape(-1, 2)
        steps = _joined(self._steps, "<u2")
        return [
            planes[:, 0],
            planes[:, 1],
            _joined(self._wide_gaps, np.uint8),
            np.minimum(steps, _WIDE_STEP).astype(np.uint8),
            steps[steps >= _WIDE_STEP].view(np.uint8),
        ]


def _joined(parts: list[Any], dtype: npt.DTypeLike) -> Any:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


# ------------------------------------------------------------------------------------------------------------- decoding


def _decode(patch: Data, result: bytearray, *, steps: bool, base_sha256: bytes, target_sha256: bytes) -> bytearray:
    """Work a patch into `result`, which holds the base."""
    reader = _Reader(patch)
    magic, base, target, length, segments = reader.unpack(_HEADER)
    if magic != MAGIC or length != len(result) or segments > MAX_SEGMENTS:
        raise MalformedError("not a patch, or one of another format or length")
    if (base, target) != (base_sha256, target_sha256):
        raise MalformedError(f"a patch from {base.hex()[:12]} to {target.hex()[:12]} instead of what was asked for")
    offset = 0
    for _ in range(segments):
        kind, size, changes = reader.unpack(_SEGMENT)
        width = 2 if kind == STEPS and steps else kind
        if width not in WIDTHS or not 0 < size <= length - offset or size % width:
            raise MalformedError(f"a patch with a segment of kind {kind} and {size} bytes at {offset} of {length}")
        part = np.frombuffer(result, np.uint8, size, offset)
        if kind == STEPS:
            _apply_steps(reader, part, changes)
        else:
            _apply_planes(reader, part, width)
        offset += size
    if offset != length or reader.left:
        raise MalformedError(f"a patch for {offset} of {length} bytes with {reader.left} bytes after its end")
    if hashlib.sha256(result).digest() != target_sha256:
        raise ChecksumError(f"a patch to {target_sha256.hex()[:12]} gives other bytes")
    return result


def _apply_planes(reader: _Reader, part: U8, width: int) -> None:
    for plane in range(width):
        part[plane::width] ^= reader.stream(part.size // width)


def _apply_steps(reader: _Reader, part: U8, changes: int) -> None:
    values = part.size // 2
    if changes > values:
        raise MalformedError(f"a patch with {changes} changes in {values} values")
    low, high = reader.stream(changes), reader.stream(changes)
    wide_gaps = reader.stream(4 * int(np.count_nonzero((low == 0xFF) & (high == 0xFF)))).view("<u4")
    small = reader.stream(changes)
    wide_steps = reader.stream(2 * int(np.count_nonzero(small == _WIDE_STEP))).view("<u2")
    target = part.view("<u2")  # may lie at an odd address, which numpy handles
    last = -1
    for start in range(0, changes, _PIECE):
        stop = start + _PIECE
        gaps = low[start:stop].astype(np.int64) | high[start:stop].astype(np.int64) << 8
        wide_gaps = _put_wide(gaps, _WIDE_GAP, wide_gaps)
        at = np.cumsum(gaps + 1) + last
        last = int(at[-1])
        if last >= values:
            raise MalformedError(f"a patch that changes value {last} of {values}")
        steps = small[start:stop].astype(np.uint16)
        wide_steps = _put_wide(steps, _WIDE_STEP, wide_steps)
        target[at] = _stepped(target[at], steps)


def _put_wide(values: npt.NDArray[Any], escape: int, wide: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Replace escapes by the first of the wide values; gives the rest of those."""
    escaped = np.flatnonzero(values == escape)
    values[escaped] = wide[: escaped.size]
    return wide[escaped.size :]


class _Reader:
    """Reads a patch from front to end; every size is checked before anything is allocated for it."""

    def __init__(self, data: Data) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self._take(layout.size))

    def stream(self, size: int) -> U8:
        """A stream that must give exactly `size` bytes, which the caller knows to be in bounds."""
        method, coded_size = self.unpack(_STREAM)
        coded = self._take(coded_size)
        if method == _STORED and coded_size == size:
            return np.frombuffer(coded, np.uint8)
        if method != _ZSTD or not size:
            raise MalformedError(f"a stream of {coded_size} bytes by method {method} where {size} bytes are due")
        return np.frombuffer(_decompressed(coded, size), np.uint8)

    def _take(self, size: int) -> memoryview:
        if size > self.left:
            raise MalformedError(f"a patch that ends {size - self.left} bytes early")
        self._at += size
        return self._data[self._at - size : self._at]


# --------------------------------------------------------------------------------------------------- bf16 bit patterns


def _ordered(patterns: U16) -> U16:
    """Bit patterns in the order of the numbers they stand for, −NaN lowest; one to one, so −0 comes just before +0."""
    signs = (patterns.view(np.int16) >> 15).view(np.uint16)
    return patterns ^ (signs | np.uint16(0x8000))


def _patterns(ordered: U16) -> U16:
    signs = (~ordered.view(np.int16) >> 15).view(np.uint16)
    return ordered ^ (signs | np.uint16(0x8000))


def _steps_between(old: U16, new: U16) -> U16:
    """Signed distance in bf16 order, modulo 2^16, as zigzag: 0, −1, 1, −2 … are 0, 1, 2, 3 …"""
    distance = (_ordered(new) - _ordered(old)).view(np.int16)
    return (distance << 1 ^ distance >> 15).view(np.uint16)


def _stepped(old: U16, steps: U16) -> U16:
    distance = (steps >> 1) ^ (~(steps & np.uint16(1)) + np.uint16(1))
    return _patterns(_ordered(old) + distance)


def _bytes(data: Data) -> U8:
    return np.frombuffer(data, np.uint8)


def _values(data: U8) -> U16:
    """bf16 patterns; copied when they lie at an odd address, which numpy would work on slowly."""
    values: U16 = data.view("<u2")
    return values if values.flags.aligned else values.copy()


def _compressed(raw: U8) -> bytes:
    """A zstd frame that states its size. A compressor a call: none may be used by two threads."""
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw.data)


def _decompressed(coded: memoryview, size: int) -> bytes:
    """One frame of exactly `size` bytes: the size it states is looked at before anything is allocated.

    Raises MalformedError.
    """
    import zstandard

    try:
        stated = zstandard.frame_content_size(coded)
        if stated != size:
            raise MalformedError(f"a stream of a patch does not decompress to {size} bytes: it states {stated}")
        return zstandard.ZstdDecompressor().decompress(coded, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedError(f"a stream of a patch does not decompress to {size} bytes: {error}") from error
