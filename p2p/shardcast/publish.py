"""Signing a checkpoint while it is hashed: a plan at once, parts as shards are done, the manifest at the end.

So relays begin with the first shard while the last ones have not been read yet. Pure reading and signing; the store
decides where files lie and what is announced.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from p2p.shardcast.hashing import FileHashes, hash_shard
from p2p.shardcast.partial import check_tensor_file
from protocol.checkpoint import Layout, check_names, content_digest, shard_count
from protocol.constants import MAX_SHARDS
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import MalformedError, ModelError
from protocol.identity import Identity
from protocol.records import CheckpointFile, CheckpointManifest, CheckpointPart, CheckpointPlan, PlannedFile
from protocol.tensorfile import SUFFIX

PART_EVERY_S: Final = 0.1
"""Between two parts; the first one follows the first shard at once."""

OnPart = Callable[[Signed[CheckpointPart]], None]


@dataclass(frozen=True)
class Publication:
    """What is said of a policy by whom."""

    identity: Identity
    run_id: bytes
    step: int
    shard_bytes: int

    def sign_plan(self, directory: Path, names: Sequence[str]) -> Signed[CheckpointPlan]:
        """Sign the files' sizes. Raises ModelError for too many bytes, or a file that is not what its name says."""
        files = tuple(PlannedFile(name=name, size=(directory / name).stat().st_size) for name in names)
        total = sum(file.size for file in files)
        if shard_count(total, self.shard_bytes) > MAX_SHARDS:
            raise ModelError(f"{total} bytes make more than {MAX_SHARDS} shards of {self.shard_bytes} bytes")
        for file in files:
            _require_tensors(directory / file.name, file.size)
        plan = CheckpointPlan(
            run_id=self.run_id, step=self.step, issued_at_ms=_now_ms(), shard_bytes=self.shard_bytes, files=files
        )
        return open_envelope(seal(plan, self.identity), CheckpointPlan)

    def sign_manifest(
        self, directory: Path, plan: Signed[CheckpointPlan], on_part: OnPart
    ) -> Signed[CheckpointManifest]:
        """Hash a plan's files once from front to back, handing out parts on the way; gives the manifest.

        Raises ModelError when a file is cut short meanwhile.
        """
        layout, hashes = Layout.of(plan.record), FileHashes()
        parts = _Parts(self.identity, plan.id, on_part)
        for index in range(layout.shards):
            shard = hash_shard(directory, layout, index)
            hashes.add(shard)
            parts.add(shard.sha256)
        parts.finish()
        record = CheckpointManifest(
            run_id=self.run_id,
            step=self.step,
            issued_at_ms=_now_ms(),
            shard_bytes=self.shard_bytes,
            files=tuple(CheckpointFile(name=name, size=size, sha256=hashes.of(name)) for name, size in layout.files),
            shards=tuple(parts.signed),
            sha256=content_digest(parts.signed),
        )
        return open_envelope(seal(record, self.identity), CheckpointManifest)

    def is_same(self, old: Signed[CheckpointManifest], new: Signed[CheckpointManifest]) -> bool:
        """Whether two manifests say the same, at whatever time."""
        return replace(old.record, issued_at_ms=0) == replace(new.record, issued_at_ms=0)


class _Parts:
    """Collects shard hashes and signs them in parts."""

    def __init__(self, identity: Identity, plan: bytes, on_part: OnPart) -> None:
        self.signed: list[bytes] = []
        self._identity = identity
        self._plan = plan
        self._on_part = on_part
        self._waiting: list[bytes] = []
        self._number = 0
        self._due_at = 0.0

    def add(self, shard: bytes) -> None:
        self._waiting.append(shard)
        if time.monotonic() >= self._due_at:
            self.finish()
            self._due_at = time.monotonic() + PART_EVERY_S

    def finish(self) -> None:
        if not self._waiting:
            return
        part = CheckpointPart(
            plan=self._plan, number=self._number, first_shard=len(self.signed), shards=tuple(self._waiting)
        )
        self.signed += self._waiting
        self._waiting = []
        self._number += 1
        self._on_part(open_envelope(seal(part, self._identity), CheckpointPart))


def link_files(source: Path, target: Path) -> list[str]:
    """Bring a policy's files into another directory, linked if possible; gives their names in order of sharding.

    Raises ModelError.
    """
    names = _file_names(source)
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source / name, target / name)
    return names


def _file_names(source: Path) -> list[str]:
    names = sorted(path.name for path in source.iterdir() if path.is_file() and not path.name.startswith("."))
    if not any((source / name).stat().st_size for name in names):
        raise ModelError(f"{source} holds no policy: no file with anything in it")
    try:
        check_names(names)
    except MalformedError as error:
        raise ModelError(f"{source} cannot be published: {error.message}", hint="rename or remove that file") from error
    return names


def _require_tensors(path: Path, size: int) -> None:
    if path.name.endswith(SUFFIX):
        try:
            check_tensor_file(path, size)
        except MalformedError as error:
            raise ModelError(f"this policy cannot be published: {error.message}") from error


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
