"""Checkpoints on this node's disk: published, half downloaded, complete, leased, pruned (SHARDCAST).

A complete checkpoint is one directory with the policy's files under their names, so that an engine loads it in place;
its shards are ranges of those files and are never stored twice. A download is written at its final offsets and becomes
a checkpoint by one rename. Hashing for publication is p2p.shardcast.publish's work. Look-ups and leases are quick and
safe from any thread; what hashes or syncs is async.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import trio

from p2p.http import FileRange
from p2p.shardcast.draft import Draft
from p2p.shardcast.entries import MANIFEST, PARTIAL, PLAN, Entry, Progress, reopen
from p2p.shardcast.hashing import is_sound
from p2p.shardcast.partial import BITMAP, PartialCheckpoint, sync_file
from p2p.shardcast.publish import Publication, link_files
from protocol.atomic import replace_whole
from protocol.checkpoint import Layout
from protocol.envelope import Signed
from protocol.errors import DataDirError, ModelError, ProtocolError, RefusedError
from protocol.identity import Identity
from protocol.records import CheckpointManifest, CheckpointPart, CheckpointPlan

log = logging.getLogger(__name__)

SPARE_BYTES: Final = 64 << 20
"""Left free on the disk by a download, so that the node can still write its records."""


class CheckpointStore:
    """Keeps the `keep` newest complete checkpoints under `directory`, and downloads until they are complete.

    With `max_bytes` they take no more than that: older ones make room for a download; the newest complete one stays.
    """

    def __init__(self, directory: Path, *, keep: int = 5, max_bytes: int = 0) -> None:
        self._directory = directory
        self._keep = keep
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._entries: dict[bytes, Entry] = {}
        """By the manifest's id and by the plan's: a checkpoint that is on its way may have two names."""
        self._listeners: list[Callable[[], None]] = []
        directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(directory.iterdir()):
            self._adopt(path)

    # ------------------------------------------------------------------------------------------- quick, any thread

    def complete(self) -> list[tuple[int, bytes]]:
        """Step and id of every complete checkpoint, oldest first."""
        with self._lock:
            return sorted(
                (entry.step, entry.draft.manifest.id)
                for entry in self._each()
                if entry.complete and entry.draft.manifest is not None
            )

    def local_dir(self, checkpoint: bytes) -> Path | None:
        """Directory of a complete checkpoint with the files under their names; None when it is not here.

        Hold a `lease` while the files are in use.
        """
        with self._lock:
            entry = self._entries.get(checkpoint)
            return entry.directory if entry is not None and entry.complete else None

    def manifest(self, checkpoint: bytes) -> Signed[CheckpointManifest] | None:
        """The manifest of a checkpoint that is here in part or whole; None too while it has only a plan."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            return entry.draft.manifest if entry is not None else None

    def draft(self, checkpoint: bytes) -> Draft | None:
        """What is signed of a checkpoint or plan that is here in part or whole; only to be read."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            return entry.draft if entry is not None else None

    def newest_plan(self, oldest_step: int) -> Signed[CheckpointPlan] | None:
        """The newest plan that is here, of `oldest_step` or later."""
        with self._lock:
            plans = [entry.draft.plan for entry in self._each() if entry.draft.plan is not None]
            return max(
                (plan for plan in plans if plan.record.step >= oldest_step),
                key=lambda plan: (plan.record.step, plan.record.issued_at_ms),
                default=None,
            )

    def progress(self, checkpoint: bytes) -> Progress | None:
        """How far a checkpoint or plan is here; None when it is not known."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            return None if entry is None else Progress.of(entry)

    @property
    def held_bytes(self) -> int:
        """What checkpoints take on the disk, downloads under way at their full size."""
        with self._lock:
            return sum(entry.draft.layout.total_bytes for entry in self._each())

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called, from any thread, whenever a standing may have changed; it must not block."""
        self._listeners.append(listener)

    @contextmanager
    def lease(self, checkpoint: bytes) -> Iterator[Path]:
        """Keep a complete checkpoint from being pruned for a block's length; gives its directory. Raises ModelError."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            if entry is None or not entry.complete:
                raise ModelError(f"checkpoint {checkpoint.hex()[:12]} is not on this node")
            entry.readers += 1
        with self._releasing(entry):
            yield entry.directory

    @contextmanager
    def _releasing(self, entry: Entry) -> Iterator[None]:
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
        layout = entry.draft.layout
        if not 0 <= index < layout.shards:
            raise RefusedError(f"there is no shard {index}; there are {layout.shards}", code="not-found")
        if not entry.has(index):
            raise RefusedError(f"shard {index} is still on its way to this node", code="not-yet")
        return [
            (entry.directory / name, offset, length) for name, offset, length in layout.extents(layout.range(index))
        ]

    def _each(self) -> list[Entry]:
        return list({id(entry): entry for entry in self._entries.values()}.values())

    def _enter(self, entry: Entry) -> None:
        for name in entry.draft.ids:
            self._entries[name] = entry

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    # --------------------------------------------------------------------------------------------------- publishing

    async def publish(
        self, source: Path, *, identity: Identity, run_id: bytes, step: int, shard_bytes: int
    ) -> Signed[CheckpointManifest]:
        """Take in a policy's directory and sign its manifest; the files are hard-linked where the file system allows.

        Shards may be had, under the plan's id, from the moment they are hashed. `source` may be removed afterwards,
        but its files must not be changed in place. Publishing the same files for the same step again gives the manifest
        that is already here. Raises ModelError, and DataDirError when the disk fails.
        """
        publication = Publication(identity, run_id, step, shard_bytes)
        try:
            return await trio.to_thread.run_sync(self._publish, source, publication)
        except OSError as error:
            raise DataDirError(
                f"the policy of step {step} cannot be published: {error.strerror or error}",
                hint=f"free some space (df -h {self._directory}), then start the node again: it publishes it",
            ) from error

    def _publish(self, source: Path, publication: Publication) -> Signed[CheckpointManifest]:
        staging = self._directory / f".incoming-{publication.step:06d}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        entry = None
        try:
            plan = publication.sign_plan(staging, link_files(source, staging))
            old = self._complete_like(Layout.of(plan.record))
            if old is None:
                entry = self._announce(plan, staging)
            manifest = publication.sign_manifest(staging, plan, lambda part: self._learn(entry, part))
            if old is not None and publication.is_same(old, manifest):
                return old
            return self._settle_published(staging, entry or Entry(Draft(manifest), staging, None, False), manifest)
        finally:
            if entry is not None and not entry.complete:
                self._drop(entry)
            shutil.rmtree(staging, ignore_errors=True)

    def _complete_like(self, layout: Layout) -> Signed[CheckpointManifest] | None:
        with self._lock:
            return next(
                (entry.draft.manifest for entry in self._each() if entry.complete and entry.draft.layout == layout),
                None,
            )

    def _announce(self, plan: Signed[CheckpointPlan], staging: Path) -> Entry:
        entry = Entry(Draft(plan), staging, None, False)
        with self._lock:
            self._enter(entry)
        self._changed()
        return entry

    def _learn(self, entry: Entry | None, part: Signed[CheckpointPart]) -> None:
        if entry is not None:
            with self._lock:
                entry.draft.add_part(part)
            self._changed()

    def _settle_published(
        self, staging: Path, entry: Entry, manifest: Signed[CheckpointManifest]
    ) -> Signed[CheckpointManifest]:
        self._settle(staging, manifest, entry)
        log.info(
            "published step=%d id=%s bytes=%d shards=%d",
            *(manifest.record.step, manifest.id.hex()[:12]),
            *(manifest.record.total_bytes, len(manifest.record.shards)),
        )
        return manifest

    def _drop(self, entry: Entry) -> None:
        with self._lock:
            for name in entry.draft.ids:
                self._entries.pop(name, None)

    # -------------------------------------------------------------------------------------------------- downloading

    @contextmanager
    def begin(self, signed: Signed[CheckpointManifest] | Signed[CheckpointPlan]) -> Iterator[PartialCheckpoint | None]:
        """Open a download for the length of a block, or go on with one; None when the checkpoint is complete already.

        The record must have passed CheckpointRules. A manifest closes a download that its plan began. Blocks for a
        moment. Raises DataDirError when the disk is too small, before anything is allocated.
        """
        with self._lock:
            entry = self._entries.get(signed.id) or self._joined_by(signed) or self._begin(signed)
            entry.readers += 1
        with self._releasing(entry):
            yield entry.partial

    def learn(self, plan: bytes, part: Signed[CheckpointPart]) -> range:
        """Take the next part of a plan whose download was begun; gives its shards. Raises MalformedError."""
        with self._lock:
            entry = self._entries.get(plan)
            if entry is None:
                raise ModelError(f"no download of plan {plan.hex()[:12]} was begun")
            news = entry.draft.add_part(part)
        self._changed()
        return news

    def close(self, manifest: Signed[CheckpointManifest]) -> bool:
        """Let a manifest close the download that its plan began, if there is one; whether there was."""
        with self._lock:
            return manifest.id not in self._entries and self._joined_by(manifest) is not None

    def _joined_by(self, signed: Signed[CheckpointManifest] | Signed[CheckpointPlan]) -> Entry | None:
        """The checkpoint that a plan or manifest belongs to although it began with the other one."""
        layout = Layout.of(signed.record)
        for entry in self._each():
            if entry.draft.layout != layout:
                continue
            if isinstance(signed.record, CheckpointPlan):
                if entry.draft.plan is not None:
                    continue
                entry.draft.plan = Signed(signed.record, signed.author, signed.id, signed.data)
            elif entry.partial is not None and entry.draft.manifest is None:
                replace_whole(entry.directory / MANIFEST, signed.data, sync=False)
                changed = entry.draft.close(Signed(signed.record, signed.author, signed.id, signed.data))
                entry.partial.forget(changed)
            else:
                continue
            self._enter(entry)
            self._changed()
            return entry
        return None

    def _begin(self, signed: Signed[CheckpointManifest] | Signed[CheckpointPlan]) -> Entry:
        directory = self._directory / f"{PARTIAL}{signed.id.hex()}"
        self._make_room(Layout.of(signed.record))
        self._require_space(Layout.of(signed.record), directory)
        directory.mkdir(exist_ok=True)
        name = MANIFEST if isinstance(signed.record, CheckpointManifest) else PLAN
        replace_whole(directory / name, signed.data, sync=False)
        draft = Draft(signed)
        entry = Entry(draft, directory, PartialCheckpoint(directory, draft, on_change=self._changed), False)
        self._enter(entry)
        self._changed()
        return entry

    def _make_room(self, layout: Layout) -> None:
        """Keep to `max_bytes`: the oldest checkpoints that nobody reads go, never the newest. Raises DataDirError."""
        if not self._max_bytes:
            return
        held = sorted(self._each(), key=lambda entry: entry.step)
        newest = max((entry.step for entry in held if entry.complete), default=-1)
        total = layout.total_bytes + sum(entry.draft.layout.total_bytes for entry in held)
        for entry in held:
            if total <= self._max_bytes:
                return
            if entry.readers == 0 and entry.step != newest:
                total -= entry.draft.layout.total_bytes
                shutil.rmtree(self._bury(entry), ignore_errors=True)
        if total > self._max_bytes:
            raise DataDirError(
                f"checkpoint step {layout.step} needs {layout.total_bytes} bytes; with those in use that is {total}, "
                f"and policies may take {self._max_bytes}",
                hint=f"give this node more: --policies-quota-bytes {total}, or 0 for no limit",
            )

    def _require_space(self, layout: Layout, directory: Path) -> None:
        held = sum(path.stat().st_blocks * 512 for path in directory.iterdir()) if directory.is_dir() else 0
        free = shutil.disk_usage(self._directory).free
        if layout.total_bytes - held + SPARE_BYTES > free:
            raise DataDirError(
                f"checkpoint step {layout.step} needs {layout.total_bytes} bytes; {free} are free in {self._directory}",
                hint="free some disk space, or move --data-dir to a larger disk; the download goes on where it stopped",
            )

    async def install(self, checkpoint: bytes) -> Path:
        """Make a download whose every shard is verified a checkpoint; gives its directory.

        Each shard was hashed when it arrived, or after a restart; only where files meet is it done again, for the
        files' own hashes. Raises MalformedError when one of them is wrong or a tensor file could harm whoever opens it;
        ModelError when the download is not finished.
        """
        return await trio.to_thread.run_sync(self._install, checkpoint)

    def _install(self, checkpoint: bytes) -> Path:
        with self._lock:
            entry = self._entries.get(checkpoint)
            if entry is None:
                raise ModelError(f"no download of checkpoint {checkpoint.hex()[:12]} was begun")
            download = entry.partial
            manifest = entry.draft.manifest
            entry.readers += 1
        with self._releasing(entry):
            if download is None:
                return entry.directory
            if manifest is None or not download.is_whole:
                missing = entry.draft.layout.shards - download.count
                raise ModelError(f"checkpoint {checkpoint.hex()[:12]} lacks {missing} shards or its manifest")
            download.check_files()
            return self._settle(entry.directory, manifest, entry)

    async def verify(self, checkpoint: bytes) -> bool:
        """Hash a complete checkpoint that an earlier process installed; one that is damaged is removed.

        Whether it is here and sound. Disks lose bytes, and what an engine loads must be what was signed.
        """
        return await trio.to_thread.run_sync(self._verify, checkpoint, abandon_on_cancel=True)

    def _verify(self, checkpoint: bytes) -> bool:
        with self._lock:
            entry = self._entries.get(checkpoint)
            manifest = entry.draft.manifest if entry is not None and entry.complete else None
            if entry is None or manifest is None:
                return False
            entry.readers += 1
        with self._releasing(entry):
            if is_sound(entry.directory, manifest.record):
                return True
            log.error("checkpoint=%s step=%d cause=damaged-on-disk", checkpoint.hex()[:12], entry.step)
            with self._lock:
                grave = self._bury(entry)
        shutil.rmtree(grave, ignore_errors=True)
        return False

    def discard(self, checkpoint: bytes) -> None:
        """Throw a download away, for a manifest that proved to be unusable."""
        with self._lock:
            entry = self._entries.get(checkpoint)
            grave = self._bury(entry) if entry is not None and entry.partial is not None else None
        if grave is not None:
            shutil.rmtree(grave, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------ keeping

    def prune(self, *, spare: bytes = b"") -> list[int]:
        """Remove complete checkpoints beyond the newest `keep`, and older downloads; never one in use, nor `spare`.

        Gives the steps that were removed. Called whenever a checkpoint is installed.
        """
        with self._lock:
            complete = self.complete()
            kept = {key for _, key in complete[-self._keep :]} | {spare}
            newest = complete[-1][0] if complete else -1
            doomed = [
                entry
                for entry in sorted(self._each(), key=lambda entry: entry.step)
                if entry.readers == 0 and not kept.intersection(entry.draft.ids) and entry.step <= newest
                if entry.complete or entry.partial is not None
            ]
            graves = [self._bury(entry) for entry in doomed]
        for grave in graves:
            shutil.rmtree(grave, ignore_errors=True)
        return [entry.step for entry in doomed]

    def _bury(self, entry: Entry) -> Path:
        """Take a checkpoint out in one step, so that a kill leaves no half of it under a good name."""
        self._drop(entry)
        grave = self._directory / f".removed-{entry.directory.name}"
        entry.directory.rename(grave)
        log.info("removed step=%d id=%s", entry.step, entry.draft.ids[0].hex()[:12])
        return grave

    def _settle(self, directory: Path, manifest: Signed[CheckpointManifest], entry: Entry) -> Path:
        """Sync a directory's files and give it its final name; only then is the checkpoint complete."""
        replace_whole(directory / MANIFEST, manifest.data, sync=False)
        for name in [MANIFEST, *(file.name for file in manifest.record.files)]:
            sync_file(directory / name)
        for name in (BITMAP, PLAN):
            (directory / name).unlink(missing_ok=True)
        sync_file(directory)
        target = self._directory / f"step-{manifest.record.step:06d}-{manifest.id.hex()[:8]}"
        with self._lock:
            directory.rename(target)
            sync_file(self._directory)
            if entry.draft.manifest is None:
                entry.draft.close(manifest)
            entry.directory, entry.partial, entry.complete = target, None, True
            self._enter(entry)
        self._changed()
        self.prune(spare=manifest.id)
        return target

    def _adopt(self, path: Path) -> None:
        """Take in what an earlier run of this node left under `path`, or clear it away."""
        if path.name.startswith((".incoming-", ".removed-")):
            shutil.rmtree(path, ignore_errors=True)
        if not path.name.startswith(("step-", PARTIAL)):
            return
        try:
            entry = reopen(path, self._changed)
        except (OSError, ProtocolError, ModelError) as error:
            log.warning("checkpoint=%s usable=no error=%r action=removed", path.name, str(error)[:300])
            shutil.rmtree(path, ignore_errors=True)
            return
        self._enter(entry)
