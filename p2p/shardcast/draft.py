"""What is signed so far of one checkpoint: first a plan, then hashes part by part, in the end the manifest.

Shards whose hash is known may travel before the rest is hashed. Records must have passed CheckpointRules; here is how
they fit together. Changed under the store's lock; reading is safe from any thread.
"""

from __future__ import annotations

from protocol.checkpoint import Layout
from protocol.envelope import Signed
from protocol.errors import MalformedError
from protocol.records import CheckpointManifest, CheckpointPart, CheckpointPlan


class Draft:
    """Starts from a plan, or from a manifest alone."""

    def __init__(self, signed: Signed[CheckpointPlan] | Signed[CheckpointManifest]) -> None:
        self.layout = Layout.of(signed.record)
        self.plan: Signed[CheckpointPlan] | None = None
        self.manifest: Signed[CheckpointManifest] | None = None
        self.parts: list[Signed[CheckpointPart]] = []
        self.hashes: list[bytes | None] = [None] * self.layout.shards
        self._hashed = 0
        if isinstance(signed.record, CheckpointPlan):
            self.plan = Signed(signed.record, signed.author, signed.id, signed.data)
        else:
            self.close(Signed(signed.record, signed.author, signed.id, signed.data))

    @property
    def ids(self) -> list[bytes]:
        """Under which names others may ask for it: the manifest's id, once there is one, and the plan's."""
        return [signed.id for signed in (self.manifest, self.plan) if signed is not None]

    def add_part(self, part: Signed[CheckpointPart]) -> range:
        """Learn the next shards' hashes; gives which. Raises MalformedError for a gap, an overlap or too many."""
        record = part.record
        if record.number != len(self.parts):
            raise MalformedError(f"part {record.number} of a checkpoint plan where part {len(self.parts)} is next")
        if record.first_shard != self._hashed:
            fault = "overlap with" if record.first_shard < self._hashed else "leave a gap after"
            raise MalformedError(f"part {record.number} of a checkpoint plan: its shards {fault} shard {self._hashed}")
        end = self._hashed + len(record.shards)
        if end > self.layout.shards:
            raise MalformedError(
                f"part {record.number} of a checkpoint plan reaches to shard {end} of {self.layout.shards}"
            )
        news = range(self._hashed, end)
        if self.manifest is None:
            self.hashes[news.start : news.stop] = record.shards
        self.parts.append(part)
        self._hashed = end
        return news

    def close(self, manifest: Signed[CheckpointManifest]) -> list[int]:
        """Take the manifest, whose word is final; gives the shards whose hash it changed. Raises MalformedError."""
        if not self.matches(manifest):
            raise MalformedError(f"the manifest of checkpoint step {manifest.record.step} is not of this plan's files")
        final = manifest.record.shards
        changed = [index for index, old in enumerate(self.hashes) if old is not None and old != final[index]]
        self.hashes[:] = final
        self.manifest = manifest
        return changed

    def continues(self, manifest: Signed[CheckpointManifest]) -> bool:
        """Whether a manifest is what the plan and the parts so far have announced."""
        final = manifest.record.shards
        return self.matches(manifest) and all(
            old is None or old == new for old, new in zip(self.hashes, final, strict=True)
        )

    def matches(self, manifest: Signed[CheckpointManifest]) -> bool:
        """Whether a manifest is of the same step and files, so that it may close this draft."""
        return Layout.of(manifest.record) == self.layout
