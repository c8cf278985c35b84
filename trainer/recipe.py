"""A recipe: everything an operator decides about a run, in one TOML file.

The part that all nodes must agree on goes into the signed manifest; how the trainer optimises stays with the trainer.
Unknown keys are refused with the nearest known name. This module never imports torch.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from protocol.batches import most_submissions
from protocol.constants import MAX_BATCH_GROUPS, MAX_BATCH_SUBMISSIONS
from protocol.errors import ConfigError
from protocol.records import (
    BatchSpec,
    CheckSpec,
    Count,
    Dtype,
    Name,
    ParameterName,
    ParameterValue,
    Positive,
    RolloutSpec,
    Tolerance,
    ToplocSpec,
)

RECIPES_DIR: Final = Path(__file__).parent / "recipes"
ASSETS_DIR: Final = Path(__file__).parent / "assets"
MAX_RECIPE_BYTES: Final = 1 << 14
"""The TOML parser's time rises with the square of the nesting; this much is parsed in a second or two at worst."""

OPEN_WORK_BITS: Final = 8
"""256 tries on average: some ten seconds of one core of a laptop, once for each new key."""

PositiveFloat = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Format = Literal["float32", "bfloat16"]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a recipe."""


class ModelChoice(Section, frozen=True):
    """Which policy the run starts from."""

    source: Annotated[str, Meta(min_length=1, max_length=512)]
    """A shipped policy's name, a directory, or a Hugging Face id."""


class PoolChoice(Section, frozen=True):
    """A file that `intellect-node data filter` wrote, and when it takes over."""

    file: Annotated[str, Meta(min_length=1, max_length=512)]
    """Relative to the working directory."""
    from_step: Count = 0


class EnvironmentChoice(Section, frozen=True):
    """Where prompts and rewards come from."""

    name: Name
    parameters: Annotated[dict[ParameterName, ParameterValue], Meta(max_length=32)] = {}
    """What the environment lets a run choose; `intellect-node env show NAME` lists it."""
    data: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """A file of problems that the environment draws from; it travels with the policy."""
    pools: Annotated[tuple[PoolChoice, ...], Meta(max_length=8)] = ()
    """A curriculum: prompts are drawn from the last pool whose `from_step` has come. They travel with the policy."""

    def __post_init__(self) -> None:
        steps = [pool.from_step for pool in self.pools]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"from_step must rise from pool to pool, and is {', '.join(map(str, steps))}")


class AdmissionChoice(Section, frozen=True):
    """Who may contribute, and what a new key costs."""

    kind: Literal["open", "allow-list", "invite"] = "open"
    """`invite`: with a file of `intellect-node invite create`, each good for one key."""
    allowed: Annotated[tuple[str, ...], Meta(max_length=32)] = ()
    """With `allow-list`: peer ids."""
    work_bits: Annotated[int, Meta(ge=0, le=32)] | None = None
    """A new key proves work of 2 to this power tries on average, of about 40 ms on one core of a laptop; 0: none.
    Unless given OPEN_WORK_BITS in an `open` run, and 0 in others, where not everybody may come."""

    def __post_init__(self) -> None:
        if (self.kind == "allow-list") != bool(self.allowed):
            raise ValueError('`allowed` names peer ids with kind = "allow-list", and only then')

    @property
    def asked_bits(self) -> int:
        """`work_bits`, or what it is unless given."""
        if self.work_bits is not None:
            return self.work_bits
        return OPEN_WORK_BITS if self.kind == "open" else 0


class CreditChoice(Section, frozen=True):
    """What accepted work earns, and for how long a proven lie takes it back."""

    unit: Literal["tokens", "flops"] = "tokens"
    """Output tokens, or 2 · parameters · output tokens, in millions."""
    maturity_steps: Annotated[int, Meta(ge=0, le=1 << 16)] = 5
    """Credits are safe once so many more steps are trained; for as long rejections can be appealed."""


class OptimiserSettings(Section, frozen=True):
    """AdamW and the use of one batch."""

    learning_rate: PositiveFloat
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    warm_up_steps: Count = 0
    """Training steps over which the learning rate rises linearly. Adam's first steps are its wildest."""
    max_grad_norm: PositiveFloat = 1.0
    updates_per_step: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Optimiser steps that one batch is divided into."""
    micro_batch_tokens: Annotated[int, Meta(ge=1)] = 8192
    """Tokens that are in memory at once; changes speed and memory, not the loss. A longer rollout stands alone."""
    max_skipped_in_a_row: Positive = 8
    """The run stops when so many optimiser steps one after another had a loss or gradient that is not finite."""
    seed: Count = 0
    """With the step's number it fixes which groups share an optimiser step."""


class PolicySettings(Section, frozen=True):
    """How the policy is held, computed and published; none of it changes what is learned but for rounding."""

    dtype: Format = "float32"
    """Of the published weights, which are also what the trainer computes with. With `bfloat16` patches between two
    checkpoints are small, and the optimiser keeps float32 masters, where small steps add up."""
    compute: Format = "float32"
    """Of the trainer's matrix products. `bfloat16` is for GPUs; most CPUs are slower with it."""
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    """How rollouts share a micro-batch: one a row and padded, one after another in a row, or in trees that compute the
    prompt of a group once. `auto` takes trees where they save a tenth, and pads where the model cannot be packed."""
    activation_checkpointing: bool = False
    """Compute each layer's inside anew for its gradient: about a third more work for a fraction of the memory."""
    processes: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Of the trainer on its machine, over which torchrun spreads the policy (FSDP2); on GPUs, one for each."""


class LossSettings(Section, frozen=True):
    """The loss by name, GRPO with two-sided clipping unless another is chosen (INTELLECT-2, section 3.4)."""

    objective: Literal["two_sided", "one_sided", "masked", "sequence"] = "two_sided"
    """What each token's ratio is worth: see trainer.objectives."""
    epsilon: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Ratios outside 1 ± epsilon gain nothing further. A sequence's ratio moves far less than a token's: 3e-4 there."""
    delta: Annotated[float, Meta(gt=1)] = 4.0
    """With `two_sided`: largest ratio that counts where the advantage is negative."""
    mask_difference: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """With `masked`: tokens whose probability has moved further than this, the way the advantage asks, are left out."""
    mask_drift_coefficient: Annotated[float, Meta(ge=0)] = 1e-3
    """With `masked`: weight of the squared log-ratio, which holds the policy near the one that sampled."""
    advantage: Literal["normalised", "centred", "length_weighted"] = "normalised"
    """Reward minus the group's mean, divided by its standard deviation or not; or minus the mean that weighs each
    reward by its answer's length."""
    level: Literal["token", "sample"] = "token"
    """Whether each token of a batch weighs the same, or each rollout."""
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the divergence from the policy that the run began with."""
    entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    old_logprobs: Literal["worker", "trainer"] = "worker"
    """`worker`: as recorded with the rollout, which corrects for staleness. `trainer`: recomputed before each step."""
    importance_cap: PositiveFloat | None = None
    """With `trainer`: weigh tokens by how much likelier they are now than when sampled, up to this much."""
    drop_groups_without_signal: bool = True
    """Leave out groups whose rewards are all equal: they move nothing, and would count as tokens."""

    def __post_init__(self) -> None:
        if self.objective == "two_sided" and self.delta <= 1 + self.epsilon:
            raise ValueError(
                f"delta = {self.delta:g} must be larger than 1 + epsilon = {1 + self.epsilon:g} with two_sided: "
                "it bounds ratios that the clipping leaves alone"
            )


class EvaluationSettings(Section, frozen=True):
    """How the trainer measures its policy on prompts that no contributor is given."""

    every_steps: Count = 0
    """Evaluate the initial policy and then every so many checkpoints, and the last one; 0 never does."""
    prompts: Annotated[int, Meta(ge=2, le=1 << 16)] = 64
    samples: Annotated[int, Meta(ge=1, le=1 << 12)] = 4
    """Answers to each prompt."""
    pass_at: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=8)] = (1,)
    """The k of each pass@k that is shown; none larger than `samples`."""
    temperature: Annotated[float, Meta(gt=0, le=10)] | None = None
    """The rollouts' unless given."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """The rollouts' unless given."""


class TrackingSettings(Section, frozen=True):
    """A service that draws curves from the metrics; the trainer never waits for it and never fails with it."""

    service: Literal["none", "wandb", "trackio"] = "none"
    project: Annotated[str, Meta(min_length=1, max_length=128)] = "intellect-node"


class Recipe(Section, frozen=True):
    """A run's settings; `manifest_from_recipe` turns it into the manifest."""

    name: Name
    """The run's name unless the operator gives another."""
    model: ModelChoice
    environment: EnvironmentChoice
    rollout: RolloutSpec
    batch: BatchSpec
    toploc: ToplocSpec
    tolerance: Annotated[dict[Dtype, Tolerance], Meta(min_length=1, max_length=4)]
    """By number format of contributors' engines; `intellect-node calibrate --recipe` measures them."""
    optimiser: OptimiserSettings
    policy: PolicySettings = PolicySettings()
    loss: LossSettings = LossSettings()
    checks: CheckSpec = CheckSpec(newcomer_submissions=16, floor=0.25, duplicate_tokens=32)
    quorum: Annotated[int, Meta(ge=1, le=64)] = 1
    """Validators that must agree on a submission."""
    admission: AdmissionChoice = AdmissionChoice()
    credits: CreditChoice = CreditChoice()
    shard_bytes: Annotated[int, Meta(ge=4096, le=1 << 28)] = 1 << 24
    keep_checkpoints: Positive = 5
    """Newest trainer checkpoints that stay on the trainer's disk."""
    keep_every: Count = 0
    """Checkpoints of these steps stay for good: every so many; 0 keeps none beyond the newest."""
    evaluation: EvaluationSettings = EvaluationSettings()
    tracking: TrackingSettings = TrackingSettings()
    guesses: Annotated[dict[str, Annotated[str, Meta(max_length=300)]], Meta(max_length=16)] = {}
    """Settings above that nobody has measured for this model, such as `tolerance.bfloat16`, each with how to find its
    value; the dry run warns of them."""

    @property
    def rollouts_per_submission(self) -> int:
        return self.rollout.group_size * self.rollout.prompts_per_submission


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.toml"))


def recipe_path(name_or_path: str) -> Path:
    """The file of a shipped recipe's name, or the path itself. Raises ConfigError."""
    shipped = RECIPES_DIR / f"{name_or_path}.toml"
    if "/" not in name_or_path and shipped.is_file():
        return shipped
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"there is no recipe {name_or_path!r}: neither a file nor one of {', '.join(recipe_names())}",
            hint="give --recipe one of these names, or the path of a TOML file",
        )
    return path


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe by its name or path. Raises ConfigError."""
    path = recipe_path(str(name_or_path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error.strerror}") from error
    return parse_recipe(data, origin=str(path))


def parse_recipe(data: bytes, *, origin: str = "recipe") -> Recipe:
    """Decode and check a recipe's TOML. Raises ConfigError that begins with `origin`."""
    if len(data) > MAX_RECIPE_BYTES:
        raise ConfigError(f"{origin}: larger than {MAX_RECIPE_BYTES} bytes; this is not a recipe")
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also of a number with more digits than Python reads
        raise ConfigError(f"{origin}: not valid TOML: {error}") from error
    try:
        _refuse_unknown_keys(table, Recipe, origin=origin)
        _refuse_not_finite(table, origin=origin)
        recipe = msgspec.convert(table, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_plain(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: tables lie too deep within one another") from error
    _check_sums(recipe, origin)
    _check_guesses(recipe, table, origin)
    return recipe


def _refuse_unknown_keys(table: dict[str, Any], kind: type[Struct], *, origin: str, prefix: str = "") -> None:
    types = get_type_hints(kind)
    for key, value in table.items():
        if key not in kind.__struct_fields__:
            raise ConfigError(f"{origin}: unknown key {prefix + key!r}", hint=_nearest(key, kind, prefix))
        for inner, inner_table, inner_prefix in _inner_tables(types[key], value, f"{prefix}{key}."):
            _refuse_unknown_keys(inner_table, inner, origin=origin, prefix=inner_prefix)


def _refuse_not_finite(value: Any, *, origin: str, path: str = "") -> None:
    """TOML has inf and nan, and no setting of a recipe means anything by them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {path} = {value} is not a finite number")
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_not_finite(inner, origin=origin, path=f"{path}.{key}" if path else key)
    if isinstance(value, list):
        for place, inner in enumerate(value):
            _refuse_not_finite(inner, origin=origin, path=f"{path}[{place}]")


def _inner_tables(kind: Any, value: Any, prefix: str) -> Iterator[tuple[type[Struct], dict[str, Any], str]]:
    """The tables under a key, each with the section that it is: the key's own, or those of a map by name."""
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
        yield kind, value, prefix
    elif get_origin(kind) is dict and isinstance(value, dict):
        for name, entry in value.items():
            yield from _inner_tables(get_args(kind)[1], entry, f"{prefix}{name}.")
    elif get_origin(kind) is tuple and isinstance(value, list):
        for entry in value:
            yield from _inner_tables(get_args(kind)[0], entry, prefix)
    elif get_origin(kind) is UnionType:
        for one in get_args(kind):
            yield from _inner_tables(one, value, prefix)


def _nearest(key: str, kind: type[Struct], prefix: str) -> str:
    known = kind.__struct_fields__
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    return f"known here: {', '.join(prefix + name for name in known)}"


def _plain(error: msgspec.ValidationError) -> str:
    return str(error).replace("Object missing", "missing").replace(" - at `$.", " at `")


def _check_guesses(recipe: Recipe, table: Mapping[str, Any], origin: str) -> None:
    for path in recipe.guesses:
        found: Any = table
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise ConfigError(f"{origin}: guesses names {path[:80]!r}, which is no setting of this recipe")


def _check_sums(recipe: Recipe, origin: str) -> None:
    batch, share = recipe.batch.rollouts_per_step, recipe.rollouts_per_submission
    if batch % share:
        raise ConfigError(
            f"{origin}: batch.rollouts_per_step = {batch} is not a multiple of the {share} rollouts of a submission "
            "(rollout.group_size x rollout.prompts_per_submission)"
        )
    groups = most_submissions(recipe) * recipe.rollout.prompts_per_submission
    if batch // share > MAX_BATCH_SUBMISSIONS or groups > MAX_BATCH_GROUPS:
        raise ConfigError(
            f"{origin}: a batch may hold {MAX_BATCH_SUBMISSIONS} submissions and {MAX_BATCH_GROUPS} groups, and this "
            f"one takes {batch // share} and {groups}; raise rollout.prompts_per_submission, or lower batch.max_tries"
        )
    if recipe.optimiser.updates_per_step > batch:
        raise ConfigError(f"{origin}: optimiser.updates_per_step is larger than batch.rollouts_per_step = {batch}")
    if max(recipe.evaluation.pass_at) > recipe.evaluation.samples:
        raise ConfigError(
            f"{origin}: evaluation.pass_at asks for pass@{max(recipe.evaluation.pass_at)}, which evaluation.samples = "
            f"{recipe.evaluation.samples} answers to a prompt cannot show"
        )
    if recipe.policy.dtype not in recipe.tolerance:
        raise ConfigError(
            f"{origin}: policy.dtype = {recipe.policy.dtype!r} is no format of [tolerance]: contributors whose engine "
            "computes in the format of the weights would be refused",
            hint="intellect-node calibrate --recipe measures the tolerances of a format",
        )
    if recipe.policy.compute == "bfloat16" and recipe.policy.dtype == "float32":
        raise ConfigError(
            f'{origin}: policy.compute = "bfloat16" needs policy.dtype = "bfloat16": the trainer would compute with '
            "other weights than it publishes"
        )
    if recipe.loss.importance_cap is not None and recipe.loss.old_logprobs != "trainer":
        raise ConfigError(
            f'{origin}: loss.importance_cap needs loss.old_logprobs = "trainer"; with "worker" the ratio itself '
            "already corrects for staleness"
        )
