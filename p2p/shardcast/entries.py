"""A checkpoint as the store holds it: published, on its way, or complete; and how it is found again after a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from p2p.shardcast.draft import Draft
from p2p.shardcast.partial import PartialCheckpoint
from protocol.checkpoint import Layout, check_names
from protocol.envelope import Signed, open_envelope
from protocol.errors import ModelError, ProtocolError
from protocol.records import CheckpointManifest, CheckpointPart, CheckpointPlan

MANIFEST: Final = ".manifest"
"""File names in a checkpoint never begin with a dot, so the store's own files cannot clash with them."""
PLAN: Final = ".plan"
PARTIAL: Final = "partial-"


@dataclass(eq=False)
class Entry:
    """A checkpoint of a store. `partial` is None for one that was published here and for one that is complete."""

    draft: Draft
    directory: Path
    partial: PartialCheckpoint | None
    complete: bool
    readers: int = 0

    @property
    def step(self) -> int:
        return self.draft.layout.step

    def has(self, index: int) -> bool:
        if self.partial is not None:
            return self.partial.has(index)
        return self.draft.hashes[index] is not None

    def held(self) -> int:
        """Shards that may be served, as a number whose bit i stands for shard i."""
        if self.partial is not None:
            return self.partial.held
        if self.complete:
            return (1 << self.draft.layout.shards) - 1
        return sum(1 << index for index, digest in enumerate(self.draft.hashes) if digest is not None)


class Progress(NamedTuple):
    """How far a checkpoint is here: what is signed, and which shards may be had."""

    step: int
    shards: int
    parts: Sequence[Signed[CheckpointPart]]
    manifest: Signed[CheckpointManifest] | None
    held: int

    @classmethod
    def of(cls, entry: Entry) -> Progress:
        draft = entry.draft
        return cls(entry.step, draft.layout.shards, tuple(draft.parts), draft.manifest, entry.held())


def reopen(path: Path, on_change: Callable[[], None]) -> Entry:
    """What an earlier process left in one directory. Blocks. Raises OSError, ProtocolError, ModelError."""
    partial = path.name.startswith(PARTIAL)
    draft = _draft_of(path)
    check_names([file.name for file in draft.layout.files])
    if partial:
        return Entry(draft, path, PartialCheckpoint(path, draft, on_change=on_change), False)
    _require_sizes(path, draft.layout)
    return Entry(draft, path, None, True)


def _draft_of(path: Path) -> Draft:
    """By the manifest, or the plan: a power cut can garble either, and no shard of a download."""
    plan: Signed[CheckpointPlan] | None = None
    with suppress(FileNotFoundError, ProtocolError):
        plan = open_envelope((path / PLAN).read_bytes(), CheckpointPlan)
    try:
        draft = Draft(open_envelope((path / MANIFEST).read_bytes(), CheckpointManifest))
    except (FileNotFoundError, ProtocolError):
        if plan is None:
            raise
        return Draft(plan)
    draft.plan = plan
    return draft


def _require_sizes(directory: Path, layout: Layout) -> None:
    for name, size in layout.files:
        found = (directory / name).stat().st_size
        if found != size:
            raise ModelError(f"{name} has {found} bytes instead of {size}")
