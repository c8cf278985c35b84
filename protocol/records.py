"""The records that nodes exchange, each in a signed envelope (protocol.envelope).

Times are milliseconds since 1970 UTC. Keys are raw Ed25519 public keys, digests are SHA-256. Every record that
authorises something names its run and carries a sequence number or an issue time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.constants import MAX_BATCH_GROUPS, MAX_BATCH_SUBMISSIONS, MAX_POOL_TASKS, MAX_SHARDS
from protocol.envelope import Record
from protocol.identity import PeerId

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*\Z")]
Text = Annotated[str, Meta(max_length=1024)]
Url = Annotated[str, Meta(max_length=256, pattern=r"^https://[!-~]+\Z")]
"""Whoever may be asked something is asked over TLS: a token must never travel in clear."""
Threshold = Annotated[float, Meta(ge=0)]  # refuses NaN, which every measurement would pass
FileName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z")]
PackageText = Annotated[str, Meta(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9._+!-]*)?\Z")]
"""Name or version of a distribution: goes into commands that a person is told to run."""
ParameterName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9_]*\Z")]
_Parameter = (
    Annotated[int, Meta(ge=-(2**53), le=2**53)]
    | Annotated[float, Meta(ge=-1e300, le=1e300)]
    | bool
    | Annotated[str, Meta(max_length=512)]
)
ParameterValue = _Parameter | Annotated[tuple[_Parameter, ...], Meta(max_length=64)]
Outcome = Literal["pass", "fail", "unknown"]
Dtype = Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[a-z0-9_]+\Z")]


class Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the manifest."""


class ModelSpec(Spec, frozen=True, kw_only=True):
    """Which policy the run trains, without its weights."""

    architecture: Digest
    """SHA-256 of the model's config.json as shipped with the first checkpoint."""
    tokenizer: Digest
    """SHA-256 of tokenizer.json."""
    vocab_size: Positive
    max_model_len: Positive
    stop_ids: Annotated[tuple[int, ...], Meta(max_length=16)]
    """Token ids that end a rollout."""


class PoolSpec(Spec, frozen=True, kw_only=True):
    """A file of task seeds that prompts are drawn from, from some step on (protocol.pools)."""

    sha256: Digest
    """Of the file, which travels with every checkpoint under a name that follows from this."""
    count: Annotated[int, Meta(ge=1, le=MAX_POOL_TASKS)]
    from_step: Count = 0
    """The first training step whose prompts are drawn from it; the next pool ends it."""


class EnvironmentSpec(Spec, frozen=True, kw_only=True):
    """Where prompts and rewards come from."""

    name: Name
    digest: Digest
    """Environment.digest: covers its name, version, parameters, what it requires, and its data."""
    version: Positive = 1
    """As the next four, this is what to install; only the digest says whether it is the same."""
    package: PackageText = ""
    """Distribution that brings the environment."""
    package_version: PackageText = ""
    requires: Annotated[dict[PackageText, PackageText], Meta(max_length=16)] = {}
    """Versions of other distributions that decide tasks or rewards."""
    parameters: Annotated[dict[ParameterName, ParameterValue], Meta(max_length=32)] = {}
    data: Digest | None = None
    """SHA-256 of the data file, which lies among the policy's files (environments.registry.DATA_FILE)."""
    pools: Annotated[tuple[PoolSpec, ...], Meta(max_length=8)] = ()
    """The curriculum, by rising `from_step`; before the first one, tasks are drawn from the whole environment."""

    def __post_init__(self) -> None:
        steps = [pool.from_step for pool in self.pools]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"pools: from_step must rise from pool to pool, and is {', '.join(map(str, steps))}")


class LengthSpec(Spec, frozen=True, kw_only=True):
    """Answers of a wanted length: a target for each prompt, and what missing it costs (protocol.lengths)."""

    targets: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)]
    """Lengths in tokens, all equally likely; rising."""
    alpha: Annotated[float, Meta(ge=0, le=1)]
    """Taken from the reward for each token that an answer is longer or shorter than its target."""

    def __post_init__(self) -> None:
        if any(later <= earlier for earlier, later in pairwise(self.targets)):
            raise ValueError(f"targets must rise, and are {', '.join(map(str, self.targets))}")


class RolloutSpec(Spec, frozen=True, kw_only=True):
    """Limits of one submission."""

    group_size: Annotated[int, Meta(ge=2, le=256)]
    """Rollouts per prompt (GRPO's group)."""
    prompts_per_submission: Annotated[int, Meta(ge=1, le=4096)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    temperature: Annotated[float, Meta(gt=0, le=10)]
    max_submissions_per_step: Annotated[int, Meta(ge=1, le=1 << 16)]
    """Most submissions of one node at one step."""
    length: LengthSpec | None = None
    """Length rewards; none unless given."""

    def __post_init__(self) -> None:
        if self.length is not None and self.length.targets[-1] > self.max_new_tokens:
            raise ValueError(
                f"length.targets: {self.length.targets[-1]} tokens cannot be reached with max_new_tokens = "
                f"{self.max_new_tokens}"
            )


class BatchSpec(Spec, frozen=True, kw_only=True):
    """What the trainer consumes."""

    rollouts_per_step: Positive
    max_staleness: Annotated[int, Meta(ge=0, le=64)]
    """Most checkpoints that a rollout's policy may lie behind the step that trains on it (asynchrony)."""
    total_steps: Positive
    signal_only: bool = False
    """Count only rollouts of groups whose rewards differ, and ask for more until there are enough (online filter)."""
    max_tries: Annotated[int, Meta(ge=1, le=64)] = 4
    """With `signal_only`: most submissions a step takes, in multiples of what it would take without."""
    deadline_s: Annotated[float, Meta(gt=0, le=30 * 86400)] | None = None
    """Seconds from a step's opening after which its batch may be short."""
    minimum_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Least share of `rollouts_per_step` that a batch is trained with; with less the step leaves the policy alone."""


class ToplocSpec(Spec, frozen=True, kw_only=True):
    """What a TOPLOC proof commits to, per chunk of 32 tokens; how far it may lie off is in `Tolerance`."""

    top_k: Annotated[int, Meta(ge=1, le=4096)]


class Tolerance(Spec, frozen=True, kw_only=True):
    """How far an honest engine of one number format may lie from a validator's float32 pass; found by calibration."""

    max_exponent_mismatches: Count
    """Of a full chunk's proof, as the next two; a shorter chunk has looser limits (node.validator.checks)."""
    max_mantissa_mean: Threshold
    max_mantissa_median: Threshold
    max_rollout_mantissa_mean: Threshold
    """Mean over the chunks of one rollout."""
    max_margin: Threshold
    """By how many logits one emitted token may lose against the best one."""
    max_mean_margin: Threshold
    """Mean clipped margin over the tokens of one submission."""
    max_logprob_error: Threshold
    """Between a recorded log-probability and the validator's."""
    max_mean_logprob_error: Threshold
    """Mean size of that difference, each clipped, over the tokens of one submission."""
    max_logprob_shift: Threshold
    """The same of the mean with signs, either way: rounding cancels out in it."""
    honest_margin: Threshold
    """Clipped margin that no honest machine exceeds on average over its rollouts (protocol.sequential)."""
    honest_mantissa: Threshold
    """The same for the mantissa mean of rollouts."""
    honest_logprob_shift: Threshold
    """The same for the size of the mean log-probability error of the answers to one prompt."""


class CheckSpec(Spec, frozen=True, kw_only=True):
    """How often the costly checks are made, and what counts as a copied answer (protocol.draw)."""

    newcomer_submissions: Positive
    """Accepted submissions, without a rejection among them, that are checked in full before the rate falls."""
    floor: Annotated[float, Meta(gt=0, le=1)]
    """Share of submissions that is checked in full however good the record is."""
    duplicate_tokens: Annotated[int, Meta(ge=8, le=1 << 20)]
    """Answers shorter than this may be equal by chance and are never compared."""


class Manifest(Record, frozen=True, kw_only=True):
    """What a run is; immutable. The id of its envelope is the run id. Signed by the operator."""

    KIND = "manifest"
    MAX_BYTES = 6 * 1024

    name: Name
    issued_at_ms: Count
    trainer: Key
    validators: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=64)]
    quorum: Annotated[int, Meta(ge=1, le=64)]
    admission: Literal["open"]
    model: ModelSpec
    environment: EnvironmentSpec
    rollout: RolloutSpec
    batch: BatchSpec
    toploc: ToplocSpec
    tolerances: Annotated[dict[Dtype, Tolerance], Meta(min_length=1, max_length=4)]
    """By number format of the contributor's engine; rollouts of a format that is not listed are refused."""
    checks: CheckSpec
    shard_bytes: Annotated[int, Meta(ge=4096, le=1 << 28)]
    recipe: Digest
    """SHA-256 of the operator's recipe file, for audits."""

    @property
    def validator_ids(self) -> tuple[PeerId, ...]:
        return tuple(PeerId(key) for key in self.validators)

    @property
    def trainer_id(self) -> PeerId:
        return PeerId(self.trainer)

    @property
    def rollouts_per_submission(self) -> int:
        return self.rollout.group_size * self.rollout.prompts_per_submission


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


class CheckResult(Spec, frozen=True, kw_only=True):
    """One check of a verdict: what was measured and what follows."""

    name: Annotated[str, Meta(max_length=32)]
    outcome: Outcome
    detail: Text = ""
    numbers: Annotated[dict[Annotated[str, Meta(max_length=32)], float], Meta(max_length=32)] = {}
    limits: Annotated[dict[Annotated[str, Meta(max_length=32)], float], Meta(max_length=32)] = {}
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
    mean_reward: float
    engine: Annotated[str, Meta(max_length=64)]
    """The validator's, as the next one; empty where no costly check was made."""
    dtype: Annotated[str, Meta(max_length=16)]
    software: Annotated[str, Meta(max_length=64)]
    head_sequence: Count
    """Newest head that the validator knew when it judged."""
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
    mean_reward: float
    metrics: Annotated[dict[Annotated[str, Meta(max_length=32)], float], Meta(max_length=64)]
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
