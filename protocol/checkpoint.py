"""Checkpoints on paper: how a policy's files map to shards, and what must hold before a record about them is believed.

A checkpoint is its files laid end to end and cut every `shard_bytes` (SHARDCAST). The trainer signs a plan (files and
sizes), parts (hashes of the next shards) and in the end the manifest. Pure arithmetic and checks; moving and storing
the bytes is p2p.shardcast's work. Everything is checked before anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from protocol.constants import MAX_SHARDS
from protocol.envelope import Signed, open_envelope
from protocol.errors import ChecksumError, MalformedError, WrongRunError
from protocol.identity import PeerId
from protocol.records import CheckpointManifest, CheckpointPart, CheckpointPlan, Manifest

MAX_CHECKPOINT_BYTES: Final = 1 << 42
"""No checkpoint is larger, whatever its manifest says (4 TiB: what MAX_SHARDS of the largest shards hold)."""

Span = range
"""Where something lies in the byte stream."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Extent(NamedTuple):
    """A run of bytes inside one file."""

    file: str
    offset: int
    length: int


class SizedFile(Protocol):
    """A file of a plan, of a manifest or of a layout."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...


class FileSize(NamedTuple):
    """A file of a layout."""

    name: str
    size: int


def shard_count(total_bytes: int, shard_bytes: int) -> int:
    """How many shards a checkpoint has; the last one may be short."""
    return -(-total_bytes // shard_bytes)


def shard_range(index: int, total_bytes: int, *, shard_bytes: int) -> range:
    """Where shard `index` lies in the byte stream. Raises MalformedError when there is no such shard."""
    start = index * shard_bytes
    if not 0 <= start < total_bytes:
        raise MalformedError(f"there is no shard {index}; there are {shard_count(total_bytes, shard_bytes)}")
    return range(start, min(start + shard_bytes, total_bytes))


def shard_ranges(total_bytes: int, shard_bytes: int) -> Iterator[range]:
    """Where every shard lies in the byte stream, in order."""
    for start in range(0, total_bytes, shard_bytes):
        yield range(start, min(start + shard_bytes, total_bytes))


def extents(files: Sequence[SizedFile], part: range) -> Iterator[Extent]:
    """The pieces of files that a part of the byte stream covers, in order; empty files are never named."""
    start = 0
    for file in files:
        low, high = max(part.start, start), min(part.stop, start + file.size)
        if low < high:
            yield Extent(file.name, low - start, high - low)
        start += file.size


def content_digest(shards: Sequence[bytes]) -> bytes:
    """A manifest's `sha256`: over the shards' hashes, which together fix every byte."""
    return hashlib.sha256(b"".join(shards)).digest()


@dataclass(frozen=True)
class Layout:
    """What plan and manifest of one checkpoint have in common: where each shard lies."""

    step: int
    shard_bytes: int
    files: tuple[FileSize, ...]
    total_bytes: int
    shards: int

    @classmethod
    def of(cls, record: CheckpointPlan | CheckpointManifest) -> Layout:
        files = tuple(FileSize(file.name, file.size) for file in record.files)
        total = record.total_bytes
        return cls(record.step, record.shard_bytes, files, total, shard_count(total, record.shard_bytes))

    def range(self, index: int) -> Span:
        """Where a shard lies in the byte stream. Raises MalformedError."""
        return shard_range(index, self.total_bytes, shard_bytes=self.shard_bytes)

    def length(self, index: int) -> int:
        return len(self.range(index))

    def extents(self, part: Span) -> Iterator[Extent]:
        return extents(self.files, part)


def open_checkpoint(data: bytes, checkpoint: bytes) -> Signed[CheckpointManifest]:
    """Open the manifest that was asked for by its id. Raises ProtocolError: whoever sent these bytes is at fault.

    What an id names is then checked against CheckpointRules; a fault found there is its signer's.
    """
    signed = open_envelope(data, CheckpointManifest)
    if signed.id != checkpoint:
        raise ChecksumError(f"asked for checkpoint {checkpoint.hex()[:12]}, got {signed.id.hex()[:12]}")
    return signed


@dataclass(frozen=True)
class CheckpointRules:
    """What a run demands of its checkpoints' records."""

    run_id: bytes
    trainer: PeerId
    shard_bytes: int
    total_steps: int
    max_bytes: int = MAX_CHECKPOINT_BYTES

    @classmethod
    def of_run(cls, run: Signed[Manifest], *, max_bytes: int = MAX_CHECKPOINT_BYTES) -> CheckpointRules:
        """The rules that a run's manifest sets; `max_bytes` is this node's own limit."""
        record = run.record
        return cls(run.id, record.trainer_id, record.shard_bytes, record.batch.total_steps, max_bytes)

    def check(self, signed: Signed[CheckpointManifest], *, step: int | None = None) -> None:
        """Raise ProtocolError, naming the fault, unless author, run, step, files and shards are in order."""
        record = signed.require_author(self.trainer).record
        self._check_common(record)
        if step is not None and record.step != step:
            raise MalformedError(f"checkpoint {signed.id.hex()[:12]} is of step {record.step}, not {step}")
        expected = shard_count(record.total_bytes, record.shard_bytes)
        if len(record.shards) != expected:
            raise MalformedError(
                f"{len(record.shards)} shard hashes for {record.total_bytes} bytes, which make {expected} shards"
            )
        if record.sha256 != content_digest(record.shards):
            raise MalformedError(f"the manifest of step {record.step} names another content than its shards make")

    def check_plan(self, signed: Signed[CheckpointPlan]) -> None:
        """Raise ProtocolError, naming the fault, unless author, run, step and files are in order."""
        self._check_common(signed.require_author(self.trainer).record)

    def check_part(self, signed: Signed[CheckpointPart], plan: bytes) -> None:
        """Raise ProtocolError unless the trainer signed this for that plan; how parts fit is for who collects them."""
        record = signed.require_author(self.trainer).record
        if record.plan != plan:
            raise MalformedError(f"a part of plan {record.plan.hex()[:12]}, not of {plan.hex()[:12]}")

    def _check_common(self, record: CheckpointPlan | CheckpointManifest) -> None:
        if record.run_id != self.run_id:
            raise WrongRunError(f"checkpoint of run {record.run_id.hex()[:12]}; this run is {self.run_id.hex()[:12]}")
        if record.step > self.total_steps:
            raise MalformedError(f"checkpoint of step {record.step} in a run of {self.total_steps} steps")
        if record.shard_bytes != self.shard_bytes:
            raise MalformedError(f"shards of {record.shard_bytes} bytes; the run's have {self.shard_bytes}")
        check_names([file.name for file in record.files])
        if not 0 < record.total_bytes <= self.max_bytes:
            raise MalformedError(f"a checkpoint of {record.total_bytes} bytes; this node takes 1 to {self.max_bytes}")
        if (shards := shard_count(record.total_bytes, record.shard_bytes)) > MAX_SHARDS:
            raise MalformedError(f"a checkpoint of {shards} shards; at most {MAX_SHARDS} are allowed")


def check_names(names: Sequence[str]) -> None:
    """Raise MalformedError unless these names can lie side by side in one directory on any file system."""
    seen: set[str] = set()
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise MalformedError(f"unsafe file name in a checkpoint: {name[:80]!r}")
        if name.casefold() in seen:
            raise MalformedError(f"file name twice in a checkpoint: {name[:80]!r}")
        seen.add(name.casefold())
