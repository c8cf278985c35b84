"""The manifest: what a run is, in one record that never changes, and the parts that it is made of."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal

from msgspec import Meta, field

from protocol.constants import MAX_POOL_TASKS, PROOF_CHUNK_TOKENS
from protocol.envelope import Record
from protocol.fields import (
    Count,
    Digest,
    Dtype,
    Key,
    Name,
    PackageText,
    ParameterName,
    ParameterValue,
    Positive,
    Spec,
    Threshold,
)
from protocol.identity import PeerId

MAX_FILE_BYTES: Final = 4 << 30
"""No rollout file is larger, whatever a run asks for."""


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
    requires: Annotated[dict[PackageText, PackageText], Meta(max_length=16)] = field(default_factory=dict)
    """Versions of other distributions that decide tasks or rewards."""
    parameters: Annotated[dict[ParameterName, ParameterValue], Meta(max_length=32)] = field(default_factory=dict)
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


class AdmissionSpec(Spec, frozen=True, kw_only=True):
    """Who may contribute, and what a new key costs; `protocol.admissions` has the rules."""

    kind: Literal["open", "allow-list", "invite"] = "open"
    allowed: Annotated[tuple[Key, ...], Meta(max_length=32)] = ()
    """With `allow-list`: the keys that may. More people than this are asked in with invites."""
    work_bits: Annotated[int, Meta(ge=0, le=32)] = 0
    """Proof of work bound to key and run (protocol.work): 2 to this power tries on average; 0 asks for none."""

    def __post_init__(self) -> None:
        if (self.kind == "allow-list") != bool(self.allowed):
            raise ValueError('admission: `allowed` names keys with kind = "allow-list", and only then')
        if len(set(self.allowed)) != len(self.allowed):
            raise ValueError("admission.allowed: a key is named twice")

    @property
    def is_asked_for(self) -> bool:
        """Whether a contributor must be admitted before its first submission."""
        return self.kind != "open" or self.work_bits > 0


class CreditSpec(Spec, frozen=True, kw_only=True):
    """What accepted work earns, and for how long a proven lie takes it back; `protocol.balances` has the rules."""

    unit: Literal["tokens", "flops"] = "tokens"
    """Output tokens; or with `flops` 2 · parameters · output tokens, in whole millions of operations."""
    parameters: Count = 0
    """With `flops`: of the model."""
    maturity_steps: Annotated[int, Meta(ge=0, le=1 << 16)]
    """The validity window: credits are safe once so many more steps are trained than when the work was accepted."""

    def __post_init__(self) -> None:
        if (self.unit == "flops") != (self.parameters > 0):
            raise ValueError('credits: `parameters` is the size of the model with unit = "flops", and 0 otherwise')

    def of(self, output_tokens: int) -> int:
        """What a submission of so many tokens earns."""
        return output_tokens if self.unit == "tokens" else 2 * self.parameters * output_tokens // 10**6


class Manifest(Record, frozen=True, kw_only=True):
    """What a run is; immutable. The id of its envelope is the run id. Signed by the operator."""

    KIND = "manifest"
    MAX_BYTES = 6 * 1024

    name: Name
    issued_at_ms: Count
    trainer: Key
    validators: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=64)]
    quorum: Annotated[int, Meta(ge=1, le=64)]
    admission: AdmissionSpec
    credits: CreditSpec
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

    def bounds_fault(self, *, rollouts: int, output_tokens: int) -> str:
        """Which bound of a submission these counts break; empty if none.

        `max_new_tokens` bounds a turn, and only the environment knows of turns; `max_model_len` bounds all of them.
        """
        if rollouts > self.rollouts_per_submission:
            return f"{rollouts} rollouts; a submission of this run has at most {self.rollouts_per_submission}"
        most = rollouts * self.model.max_model_len
        if output_tokens > most:
            return f"{output_tokens} tokens; {rollouts} rollouts of this run have at most {most}"
        return ""


def max_file_bytes(manifest: Manifest) -> int:
    """The largest honest rollout file of a run: uncompressed, every rollout as long as it may be, and some slack."""
    rollout, tokens = manifest.rollout, manifest.rollout.max_new_tokens
    proofs = -(-tokens // PROOF_CHUNK_TOKENS) * (2 * manifest.toploc.top_k + 8)
    each = 8 * manifest.model.max_model_len + 16 * tokens + proofs + 512
    slack = (1 << 20) + rollout.prompts_per_submission * 1024
    return min(MAX_FILE_BYTES, manifest.rollouts_per_submission * each * 5 // 4 + slack)
