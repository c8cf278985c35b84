"""The records that nodes exchange, each in a signed envelope (protocol.envelope).

Times are milliseconds since 1970 UTC. Keys are raw Ed25519 public keys, digests are SHA-256. Every record that
authorises something names its run and carries a sequence number or an issue time. The manifest's parts are in
protocol.manifest, the records about who takes part in protocol.membership; all of them can be had from here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from protocol.constants import MAX_BATCH_GROUPS, MAX_BATCH_SUBMISSIONS, MAX_SHARDS
from protocol.envelope import Record
from protocol.fields import (
    Count,
    Digest,
    Dtype,
    FileName,
    Key,
    Name,
    Number,
    Outcome,
    PackageText,
    ParameterName,
    ParameterValue,
    Positive,
    Spec,
    Text,
    Threshold,
    Url,
)
from protocol.manifest import (
    AdmissionSpec,
    BatchSpec,
    CheckSpec,
    CreditSpec,
    EnvironmentSpec,
    LengthSpec,
    Manifest,
    ModelSpec,
    PoolSpec,
    RolloutSpec,
    Tolerance,
    ToplocSpec,
)
from protocol.membership import (
    Admission,
    Appeal,
    Heartbeat,
    Invite,
    Reinstatement,
)

__all__ = [
    "Admission",
    "AdmissionSpec",
    "Appeal",
    "Batch",
    "BatchSpec",
    "CheckResult",
    "CheckSpec",
    "CheckpointFile",
    "CheckpointManifest",
    "CheckpointPart",
    "CheckpointPlan",
    "Count",
    "CreditSpec",
    "Digest",
    "Draw",
    "Dtype",
    "EnvironmentSpec",
    "Eviction",
    "FileName",
    "Head",
    "Heartbeat",
    "Hello",
    "Invite",
    "Key",
    "LengthSpec",
    "Manifest",
    "ModelSpec",
    "Name",
    "OriginNotice",
    "Outcome",
    "PackageText",
    "ParameterName",
    "ParameterValue",
    "PlannedFile",
    "PoolSpec",
    "Positive",
    "Receipt",
    "Reinstatement",
    "RelayAdvert",
    "RolloutSpec",
    "RunPointer",
    "Spec",
    "Submission",
    "Text",
    "Threshold",
    "Tolerance",
    "ToplocSpec",
    "Trained",
    "Url",
    "Verdict",
]


class Head(Record, frozen=True, kw_only=True):
    """Where a run stands; a higher sequence replaces it. Signed by the trainer on a steady beat: the beacon."""

    KIND = "head"
    MAX_BYTES = 1024

    run_id: Digest
    sequence: Positive
    previous_sequence: Count
    """Of the head signed before this one, 0 if the trainer remembers none: proves which head is the first after one."""
    issued_at_ms: Count
    step: Count
    """The training step that rollouts are being collected for."""
    collecting: bool
    """False while the step's batch is whole and the next one cannot open before a checkpoint is published."""
    checkpoint_step: Count
    """Newest published policy: the weights after this many training steps."""
    checkpoint: Digest
    """Id of that policy's CheckpointManifest."""
    oldest_checkpoint_step: Count
    """Oldest policy whose rollouts are still taken for `step`."""
    ledger_length: Count
    ledger_tip: Digest
    finished: bool


class RunPointer(Record, frozen=True, kw_only=True):
    """DHT value under a run's address: the way from `<operator>/<name>` to its manifest. Signed by the operator."""

    KIND = "run-pointer"
    MAX_BYTES = 7 * 1024

    name: Name
    sequence: Positive
    issued_at_ms: Count
    valid_until_ms: Count
    manifest: Annotated[bytes, Meta(max_length=7 * 1024)]
    """The manifest's envelope."""


class RelayAdvert(Record, frozen=True, kw_only=True):
    """DHT value under a run's address and a relay's peer id: how to reach it. Signed by the relay."""

    KIND = "relay-advert"
    MAX_BYTES = 2048

    run: Digest
    """RunAddress.digest: a relay may serve a run before it knows its manifest."""
    sequence: Positive
    issued_at_ms: Count
    valid_until_ms: Count
    multiaddrs: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)]
    http_url: Url
    tls_fingerprint: Digest
    """SHA-256 of the certificate (DER) at `http_url`; clients accept no other, and ask no authority about it."""
    software: Annotated[str, Meta(max_length=64)]


class Hello(Record, frozen=True, kw_only=True):
    """A node proves its key to one relay, which answers with a short-lived token. Signed by the node."""

    KIND = "hello"
    MAX_BYTES = 512

    run: Digest
    """RunAddress.digest, as in the advert."""
    relay: Key
    """Whom it is said to: no other relay can use it."""
    nonce: Annotated[bytes, Meta(min_length=16, max_length=128)]
    """The relay's challenge."""


class OriginNotice(Record, frozen=True, kw_only=True):
    """The trainer tells one relay where to pull checkpoints from; never published. Signed by the trainer."""

    KIND = "origin-notice"
    MAX_BYTES = 1024

    run_id: Digest
    relay: Key
    issued_at_ms: Count
    http_url: Url
    tls_fingerprint: Digest
    """Of the origin's certificate."""
    token: Annotated[str, Meta(min_length=16, max_length=128)]
    """Bearer token for the origin, for this relay alone."""


class PlannedFile(Spec, frozen=True, kw_only=True):
    """One file of a checkpoint that is still being hashed."""

    name: FileName
    size: Count


class CheckpointPlan(Record, frozen=True, kw_only=True):
    """What a coming checkpoint's files are, signed before they are hashed; its envelope id names the plan.

    Parts that name it and then the manifest follow, so that shards travel while later ones are still being hashed.
    """

    KIND = "checkpoint-plan"
    MAX_BYTES = 256 * 1024

    run_id: Digest
    step: Count
    issued_at_ms: Count
    shard_bytes: Positive
    files: Annotated[tuple[PlannedFile, ...], Meta(min_length=1, max_length=1024)]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


class CheckpointPart(Record, frozen=True, kw_only=True):
    """Hashes of the next shards of a plan. Signed by the trainer; parts have no gap and no overlap."""

    KIND = "checkpoint-part"
    MAX_BYTES = 640 * 1024

    plan: Digest
    number: Count
    """0, 1, 2 …"""
    first_shard: Count
    shards: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_SHARDS)]


class CheckpointFile(Spec, frozen=True, kw_only=True):
    """One file of a checkpoint; files lie one after another in the byte stream that is cut into shards."""

    name: FileName
    size: Count
    sha256: Digest
    """Over the SHA-256 of its pieces laid end to end, which end where shards end; a whole shard's is the shard's."""


class CheckpointManifest(Record, frozen=True, kw_only=True):
    """A published policy: files, shards, hashes (SHARDCAST); its envelope id names it. Signed by the trainer."""

    KIND = "checkpoint"
    MAX_BYTES = 768 * 1024

    run_id: Digest
    step: Count
    issued_at_ms: Count
    shard_bytes: Positive
    files: Annotated[tuple[CheckpointFile, ...], Meta(min_length=1, max_length=1024)]
    shards: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_SHARDS)]
    sha256: Digest
    """Over the shards' hashes laid end to end: names the content, whatever else the manifest says."""

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


class Submission(Record, frozen=True, kw_only=True):
    """A contributor hands in one file of rollouts, whole groups only. Its envelope id names the submission."""

    KIND = "submission"
    MAX_BYTES = 2048

    run_id: Digest
    step: Count
    index: Count
    """0, 1, 2 … per node and step; part of the seed, and contiguous, so that prompts cannot be picked."""
    checkpoint_step: Count
    checkpoint: Digest
    sha256: Digest
    """Of the rollout file."""
    size: Positive
    rollouts: Positive
    output_tokens: Positive
    prompts: Digest
    """protocol.prompts.prompts_digest of the prompts answered, in order."""
    engine: Annotated[str, Meta(max_length=64)]
    dtype: Annotated[str, Meta(max_length=16)]
    software: Annotated[str, Meta(max_length=64)]
    issued_at_ms: Count


class Receipt(Record, frozen=True, kw_only=True):
    """A relay has stored a submission and its file. Signed by the relay."""

    KIND = "receipt"
    MAX_BYTES = 1024

    run_id: Digest
    submission: Digest
    head_sequence: Count
    """Newest head the relay held: the beacon for drawn checks is the first one after it."""
    received_at_ms: Count


Numbers = Annotated[dict[Annotated[str, Meta(max_length=32)], Number], Meta(max_length=32)]


class CheckResult(Spec, frozen=True, kw_only=True):
    """One check of a verdict: what was measured and what follows."""

    name: Annotated[str, Meta(max_length=32)]
    outcome: Outcome
    detail: Text = ""
    numbers: Numbers = field(default_factory=dict)
    limits: Numbers = field(default_factory=dict)
    """What some of the numbers were held against: they may be as large as this."""


class Draw(Spec, frozen=True, kw_only=True):
    """Whether a submission was drawn for the costly checks, and what shows it (protocol.draw)."""

    drawn: bool
    """The costly checks were made, or were due when a cheap one settled the matter."""
    rate: Annotated[float, Meta(gt=0, le=1)]
    why: Annotated[str, Meta(max_length=64)]
    beacon: Annotated[bytes, Meta(max_length=2048)]
    """Envelope of the head that drew; empty where nothing was drawn by one."""
    receipt: Annotated[bytes, Meta(max_length=2048)]
    """Envelope of the relay's receipt: the beacon is the first head after the one it names."""


class Verdict(Record, frozen=True, kw_only=True):
    """What a validator found. `undecided` costs the contributor nothing. Signed by a validator of the manifest."""

    KIND = "verdict"
    MAX_BYTES = 32 * 1024

    run_id: Digest
    submission: Digest
    contributor: Key
    step: Count
    outcome: Literal["accept", "reject", "undecided"]
    hard: bool
    """A reject that no honest node can get by accident: it evicts."""
    reason: Text
    checks: Annotated[tuple[CheckResult, ...], Meta(max_length=32)]
    draw: Draw
    mean_reward: Number
    engine: Annotated[str, Meta(max_length=64)]
    """The validator's, as the next one; empty where no costly check was made."""
    dtype: Annotated[str, Meta(max_length=16)]
    software: Annotated[str, Meta(max_length=64)]
    head_sequence: Count
    """Newest head that the validator knew when it judged."""
    appeal: Annotated[bytes, Meta(max_length=32)]
    """Id of the appeal that it answers; empty where it answers none."""
    issued_at_ms: Count


class Batch(Record, frozen=True, kw_only=True):
    """The trainer commits, before it trains, to the submissions of a step. Signed by the trainer."""

    KIND = "batch"
    MAX_BYTES = 512 * 1024

    run_id: Digest
    step: Count
    submissions: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_BATCH_SUBMISSIONS)]
    issued_at_ms: Count
    ended: Literal["whole", "tries", "deadline"]
    """Why no more submissions were waited for (protocol.batches)."""
    silent: Annotated[bytes, Meta(max_length=MAX_BATCH_GROUPS // 8)]
    """Where the run trains on groups with signal only: a bit for each group, set where all its rewards are equal."""


class Trained(Record, frozen=True, kw_only=True):
    """A training step is done and its policy is durable. Signed by the trainer."""

    KIND = "trained"
    MAX_BYTES = 4096

    run_id: Digest
    step: Count
    """The step that was trained; the policy it gave is checkpoint `step + 1`."""
    checkpoint: Digest
    mean_reward: Number
    metrics: Annotated[dict[Annotated[str, Meta(max_length=32)], Number], Meta(max_length=64)]
    """What is not a finite number is left out."""
    issued_at_ms: Count


class Eviction(Record, frozen=True, kw_only=True):
    """A contributor is out. Signed by the trainer, justified by a validator's hard verdict."""

    KIND = "eviction"
    MAX_BYTES = 5 * 1024

    run_id: Digest
    contributor: Key
    verdict: Digest
    reason: Text
    issued_at_ms: Count
