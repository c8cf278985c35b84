"""Checkpoints on this node's disk: published, half downloaded, complete, leased, pruned (SHARDCAST).

A complete checkpoint is one directory with the policy's files under their names, so that an engine loads it in place;
its shards are ranges of those files and are never stored twice. A download is written at its final offsets and becomes
a checkpoint by one rename. Look-ups and leases are quick and safe from any thread; what hashes or syncs is async.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace

from p2p.http import FileRange
from p2p.shardcast.partial import BITMAP, PartialCheckpoint, read_extent, sync_file
from protocol.checkpoint import Extent, check_names, extents, shard_count, shard_range
from protocol.constants import MAX_SHARDS
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import DataDirError, MalformedError, ModelError, ProtocolError, RefusedError
from protocol.identity import Identity
from protocol.records import CheckpointFile, CheckpointManifest

log = logging.getLogger(__name__)

MANIFEST: Final = ".manifest"
"""File names in a checkpoint never begin with a dot, so the store's own files cannot clash with them."""
SPARE_BYTES: Final = 64 << 20
"""Left free on the disk by a download, so that the node can still write its records."""


@dataclass
class _Entry:
    """A checkpoint of this store. `partial` is None once it is complete."""

    manifest: Signed[CheckpointManifest]
    directory: Path
    partial: PartialCheckpoint | None
    readers: int = 0

    @property
    def step(self) -> int:
        return self.manifest.record.step


class CheckpointStore:
    """Keeps the `keep` newest complete checkpoints under `directory`, and downloads until they are complete."""

    def __init__(self, directory: Path, *, keep: int = 5) -> None:
        self._directory = directory
        self._keep = keep
        self._lock = threading.RLock()
        self._entries: dict[bytes, _Entry] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(directory.iterdir()):
            self._adopt(path)

    # ------------------------------------------------------------------------------------------- quick, any thread

    def complete(self) -> list[tuple[int, bytes]]:
        """Step and id of every complete checkpoint, oldest first."""
        with self._lock:
            return sorted((entry.step, key) for key, entry in self._entries.items() if entry.partial is None)

    def local_dir(self, checkpoint: bytes) -> Path | None:
        """Directory of a complete checkpoint with the files under their names; None when it is not here.

        Hold a `lease` while the files are in use.
        """
        with self._lock:
            entry = self._entries.get(checkpoint)
            return entry.directory if entry is not None and entry.partial is None else None

    def manifest(self, checkpoint: bytes) -> Signed[CheckpointManifest] | None:
        """The manifest of a checkpoint that is here in part or whole."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            return entry.manifest if entry is not None else None

    @contextmanager
    def lease(self, checkpoint: bytes) -> Iterator[Path]:
        """Keep a complete checkpoint from being pruned for a block's length; gives its directory. Raises ModelError."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            if entry is None or entry.partial is not None:
                raise ModelError(f"checkpoint {checkpoint.hex()[:12]} is not on this node")
            entry.readers += 1
        with self._releasing(entry):
            yield entry.directory

    @contextmanager
    def _releasing(self, entry: _Entry) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                entry.readers -= 1

    @contextmanager
    def open_shard(self, checkpoint: bytes, index: int) -> Iterator[list[FileRange]]:
        """A verified shard as ranges of open files. Raises RefusedError "not-found" or "not-yet"."""
        with ExitStack() as files:
            with self._lock:
                ranges = [
                    FileRange(files.enter_context(path.open("rb", buffering=0)), offset, length)
                    for path, offset, length in self._locate(checkpoint, index)
                ]
            yield ranges

    def _locate(self, checkpoint: bytes, index: int) -> list[tuple[Path, int, int]]:
        entry = self._entries.get(checkpoint)
        if entry is None:
            raise RefusedError(f"checkpoint {checkpoint.hex()[:12]} is not here", code="not-found")
        record = entry.manifest.record
        if not 0 <= index < len(record.shards):
            raise RefusedError(f"there is no shard {index}; there are {len(record.shards)}", code="not-found")
        if entry.partial is not None and not entry.partial.has(index):
            raise RefusedError(f"shard {index} is still on its way to this node", code="not-yet")
        part = shard_range(index, record.total_bytes, shard_bytes=record.shard_bytes)
        return [(entry.directory / name, offset, length) for name, offset, length in extents(record.files, part)]

    # --------------------------------------------------------------------------------------------------- publishing

    async def publish(
        self, source: Path, *, identity: Identity, run_id: bytes, step: int, shard_bytes: int
    ) -> Signed[CheckpointManifest]:
        """Take in a policy's directory and sign its manifest; the files are hard-linked where the file system allows.

        `source` may be removed afterwards, but its files must not be changed in place. Publishing the same files for
        the same step again gives the manifest that is already here. Raises ModelError.
        """
        return await trio.to_thread.run_sync(
            lambda: self._publish(source, identity=identity, run_id=run_id, step=step, shard_bytes=shard_bytes)
        )

    def _publish(
        self, source: Path, *, identity: Identity, run_id: bytes, step: int, shard_bytes: int
    ) -> Signed[CheckpointManifest]:
        staging = self._directory / f".incoming-{step:06d}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            names = _file_names(source)
            for name in names:
                _link_or_copy(source / name, staging / name)
            files, shards, whole = _hash_for_manifest(staging, names, shard_bytes)
            record = CheckpointManifest(
                run_id=run_id,
                step=step,
                issued_at_ms=time.time_ns() // 1_000_000,
                shard_bytes=shard_bytes,
                files=files,
                shards=shards,
                sha256=whole,
            )
            return self._published_before(record) or self._install_published(staging, seal(record, identity))
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _published_before(self, record: CheckpointManifest) -> Signed[CheckpointManifest] | None:
        with self._lock:
            for entry in self._entries.values():
                old = entry.manifest.record
                if entry.partial is None and replace(old, issued_at_ms=0) == replace(record, issued_at_ms=0):
                    return entry.manifest
        return None

    def _install_published(self, staging: Path, envelope: bytes) -> Signed[CheckpointManifest]:
        signed = open_envelope(envelope, CheckpointManifest)
        (staging / MANIFEST).write_bytes(envelope)
        self._settle(staging, signed)
        log.info(
            "published step=%d id=%s bytes=%d shards=%d",
            signed.record.step,
            signed.id.hex()[:12],
            signed.record.total_bytes,
            len(signed.record.shards),
        )
        return signed

    # -------------------------------------------------------------------------------------------------- downloading

    @contextmanager
    def begin(self, manifest: Signed[CheckpointManifest]) -> Iterator[PartialCheckpoint | None]:
        """Open a download for the length of a block, or go on with one; None when the checkpoint is complete already.

        The manifest must have passed CheckpointRules. Blocks for a moment. Raises DataDirError when the disk is too
        small, before anything is allocated.
        """
        with self._lock:
            entry = self._entries.get(manifest.id) or self._begin(manifest)
            entry.readers += 1
        with self._releasing(entry):
            yield entry.partial

    def _begin(self, manifest: Signed[CheckpointManifest]) -> _Entry:
        directory = self._directory / f"partial-{manifest.id.hex()}"
        self._require_space(manifest.record, directory)
        directory.mkdir(exist_ok=True)
        (directory / MANIFEST).write_bytes(manifest.data)
        entry = _Entry(manifest, directory, PartialCheckpoint(directory, manifest))
        self._entries[manifest.id] = entry
        return entry

    def _require_space(self, record: CheckpointManifest, directory: Path) -> None:
        held = sum(path.stat().st_blocks * 512 for path in directory.iterdir()) if directory.is_dir() else 0
        free = shutil.disk_usage(self._directory).free
        if record.total_bytes - held + SPARE_BYTES > free:
            raise DataDirError(
                f"checkpoint step {record.step} needs {record.total_bytes} bytes; {free} are free in {self._directory}",
                hint="free some disk space, or move --data-dir to a larger disk; the download goes on where it stopped",
            )

    async def install(self, checkpoint: bytes) -> Path:
        """Verify a finished download from disk and make it a checkpoint; gives its directory.

        Raises ChecksumError (damaged shards are missing again) or MalformedError (the download is thrown away).
        """
        return await trio.to_thread.run_sync(self._install, checkpoint)

    def _install(self, checkpoint: bytes) -> Path:
        with self._lock:
            entry = self._entries.get(checkpoint)
            if entry is None:
                raise ModelError(f"no download of checkpoint {checkpoint.hex()[:12]} was begun")
            download = entry.partial
            entry.readers += 1
        with self._releasing(entry):
            if download is None:
                return entry.directory
            if download.missing():
                raise ModelError(f"checkpoint {checkpoint.hex()[:12]} lacks {len(download.missing())} shards")
            download.verify()
            return self._settle(entry.directory, entry.manifest)

    def discard(self, checkpoint: bytes) -> None:
        """Throw a download away, for a manifest that proved to be unusable."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            grave = self._bury(checkpoint) if entry is not None and entry.partial is not None else None
        if grave is not None:
            shutil.rmtree(grave, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------ keeping

    def prune(self, *, spare: bytes = b"") -> list[int]:
        """Remove complete checkpoints beyond the newest `keep`, and older downloads; never one in use, nor `spare`.

        Gives the steps that were removed. Called whenever a checkpoint is installed.
        """
        with self._lock:
            complete = self.complete()
            kept = {key for _, key in complete[-self._keep :]}
            newest = complete[-1][0] if complete else -1
            doomed = sorted(
                (entry.step, key)
                for key, entry in self._entries.items()
                if entry.readers == 0 and key not in kept and key != spare and entry.step <= newest
            )
            graves = [self._bury(key) for _, key in doomed]
        for grave in graves:
            shutil.rmtree(grave, ignore_errors=True)
        return [step for step, _ in doomed]

    def _bury(self, checkpoint: bytes) -> Path:
        """Take a checkpoint out in one step, so that a kill leaves no half of it under a good name."""
        entry = self._entries.pop(checkpoint)
        grave = self._directory / f".removed-{checkpoint.hex()}"
        entry.directory.rename(grave)
        log.info("removed step=%d id=%s", entry.step, checkpoint.hex()[:12])
        return grave

    def _settle(self, directory: Path, manifest: Signed[CheckpointManifest]) -> Path:
        """Sync a directory's files and give it its final name."""
        for name in [MANIFEST, *(file.name for file in manifest.record.files)]:
            sync_file(directory / name)
        (directory / BITMAP).unlink(missing_ok=True)
        sync_file(directory)
        target = self._directory / f"step-{manifest.record.step:06d}-{manifest.id.hex()[:8]}"
        with self._lock:
            directory.rename(target)
            sync_file(self._directory)
            entry = self._entries.setdefault(manifest.id, _Entry(manifest, target, None))
            entry.directory, entry.partial = target, None
        self.prune(spare=manifest.id)
        return target

    def _adopt(self, path: Path) -> None:
        """Take in what an earlier run of this node left under `path`, or clear it away."""
        if path.name.startswith((".incoming-", ".removed-")):
            shutil.rmtree(path, ignore_errors=True)
        if not path.name.startswith(("step-", "partial-")):
            return
        try:
            manifest = open_envelope((path / MANIFEST).read_bytes(), CheckpointManifest)
            check_names([file.name for file in manifest.record.files])
            download = PartialCheckpoint(path, manifest) if path.name.startswith("partial-") else None
            if download is None:
                _require_sizes(path, manifest.record)
        except (OSError, ProtocolError, ModelError) as error:
            log.warning("checkpoint=%s usable=no error=%r action=removed", path.name, str(error)[:300])
            shutil.rmtree(path, ignore_errors=True)
            return
        self._entries[manifest.id] = _Entry(manifest, path, download)


def _require_sizes(directory: Path, record: CheckpointManifest) -> None:
    for file in record.files:
        size = (directory / file.name).stat().st_size
        if size != file.size:
            raise ModelError(f"{file.name} has {size} bytes instead of {file.size}")


def _file_names(source: Path) -> list[str]:
    """The files of a policy in the order in which they are sharded. Raises ModelError."""
    names = sorted(path.name for path in source.iterdir() if path.is_file() and not path.name.startswith("."))
    if not any((source / name).stat().st_size for name in names):
        raise ModelError(f"{source} holds no policy: no file with anything in it")
    try:
        check_names(names)
    except MalformedError as error:
        raise ModelError(f"{source} cannot be published: {error.message}", hint="rename or remove that file") from error
    return names


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _hash_for_manifest(
    directory: Path, names: Sequence[str], shard_bytes: int
) -> tuple[tuple[CheckpointFile, ...], tuple[bytes, ...], bytes]:
    """Read a policy once; gives its files, shard hashes and the whole's hash. Raises ModelError."""
    shards = _ShardHashes(shard_bytes)
    whole = hashlib.sha256()
    files = []
    for name in names:
        size = (directory / name).stat().st_size
        digest = hashlib.sha256()
        for piece in read_extent(directory, Extent(name, 0, size)):
            digest.update(piece)
            whole.update(piece)
            shards.update(piece)
        files.append(CheckpointFile(name=name, size=size, sha256=digest.digest()))
    total = sum(file.size for file in files)
    if shard_count(total, shard_bytes) > MAX_SHARDS:
        raise ModelError(f"{total} bytes make more than {MAX_SHARDS} shards of {shard_bytes} bytes")
    return tuple(files), shards.finish(), whole.digest()


class _ShardHashes:
    """Cuts a byte stream into shards and hashes each."""

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._digests: list[bytes] = []
        self._digest = hashlib.sha256()
        self._filled = 0

    def update(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            taken = view[: self._shard_bytes - self._filled]
            self._digest.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == self._shard_bytes:
                self._end_shard()

    def _end_shard(self) -> None:
        self._digests.append(self._digest.digest())
        self._digest = hashlib.sha256()
        self._filled = 0

    def finish(self) -> tuple[bytes, ...]:
        if self._filled:
            self._end_shard()
        return tuple(self._digests)
