"""`intellect-node calibrate`: would this machine's honest work pass the run's checks?

Generates with this machine's engine, one answer at a time and many, checks the answers as a validator does, and holds
the differences against the limits that the run's manifest has for this number format. Works offline; the computing is
done in a process of its own (node.calibrate_compute).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import trio
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from node.clock import now_ms
from node.compute.process import ComputeProcess
from node.datadir import make_directory
from node.held import held_run, newest_policy
from node.run_create import manifest_from_recipe, model_directory
from node.version import SOFTWARE
from protocol.atomic import write_atomically
from protocol.errors import ConfigError
from protocol.identity import PeerId
from protocol.records import Manifest, Tolerance
from trainer.recipe import Recipe, load_recipe

LABELS: Final = {
    "max_exponent_mismatches": "chunk exponents",
    "max_mantissa_mean": "chunk mantissas",
    "max_mantissa_median": "chunk median",
    "max_rollout_mantissa_mean": "rollout mantissas",
    "max_margin": "token margin",
    "max_mean_margin": "mean margin",
    "max_logprob_error": "log-probability",
    "max_mean_logprob_error": "mean log-prob.",
    "max_logprob_shift": "log-prob. shift",
    "honest_margin": "long-run margin",
    "honest_mantissa": "long-run mantissa",
    "honest_logprob_shift": "long-run shift",
}
"""What a person reads for each limit of Tolerance."""
BATCHES: Final = (1, 8, 64)
FILE: Final = "calibration.json"
MEASURE_TIMEOUT_S: Final = 6 * 3600.0
TIGHT_MAXIMUM: Final = 0.5
"""A largest value beyond this share of its limit may pass it one day."""
TIGHT_MEAN: Final = 0.9
"""The same for a mean, which scatters less."""
_PLOT_BINS: Final = 10
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"

SURE: Final = 0.02
"""With 95 % confidence at most this share of answers would be rejected: more answers must have been tried for less."""
CONFIDENCE: Final = 0.95

Outcome = Literal["safe", "tight", "too few to say", "would be rejected"]
Say = Callable[[str], None]


class Quantity(msgspec.Struct, frozen=True):
    """One limit and what was measured against it."""

    name: str
    """As in Tolerance."""
    limit: float | None
    """None where the run has no limits for the number format."""
    median: float
    p99: float
    largest: float
    mean: float
    histogram: list[int]
    """Counts over equal parts of 0 … limit, the last one for what lies beyond."""

    @property
    def judged(self) -> float:
        """What is held against the limit: the largest value, or for `honest_…` the mean."""
        return self.mean if self.name.startswith("honest_") else self.largest

    @property
    def share(self) -> float:
        """Of the limit that is used up."""
        if not self.judged:
            return 0.0
        return self.judged / self.limit if self.limit else float("inf")


class Sample(msgspec.Struct, frozen=True):
    """One setting of the engine."""

    batch: int
    rollouts: int
    tokens: int
    match: float
    generate_s: float
    check_s: float
    rejected: list[str]
    """Why validators would reject, of each submission that they would."""


class Calibration(msgspec.Struct, frozen=True):
    """What `calibration.json` holds."""

    outcome: Outcome
    advice: str
    answers: int
    at_most: float
    """Share of answers that would be rejected, at most, with 95 % confidence, if none of these was."""
    made_at_ms: int
    software: str
    run: str
    model: str
    engine: str
    dtype: str
    device: str
    threads: int
    samples: list[Sample]
    quantities: list[Quantity]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to calibrate."""

    data_dir: Path
    run: str | None = None
    model: Path | None = None
    recipe: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "torch"
    threads: int = 1
    rollouts: int = 384


def calibrate(plan: Plan, say: Say) -> Calibration:
    """Measure, store `calibration.json` in the data directory, and give what it holds.

    Raises ConfigError, DataDirError, ModelError or ComputeError.
    """
    calibration = _summary(plan, *measure_plan(plan, say))
    write_atomically(plan.data_dir / FILE, msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    return calibration


def measure_plan(plan: Plan, say: Say) -> tuple[Manifest, Path, list[dict[str, Any]]]:
    """The run's rules, the policy, and what was measured with each batch size. Raises as `calibrate` does."""
    if plan.rollouts < len(BATCHES):
        raise ConfigError(f"--rollouts {plan.rollouts} is too few", hint=f"give at least {len(BATCHES)}")
    manifest, model_dir = _subject(plan)
    make_directory(plan.data_dir)
    return manifest, model_dir, trio.run(_measure, plan, manifest, model_dir, say)


def _subject(plan: Plan) -> tuple[Manifest, Path]:
    """The run's rules and the policy: of the data directory, or of a recipe before there is a run."""
    if plan.recipe is not None:
        recipe = load_recipe(plan.recipe)
        model_dir = plan.model or model_directory(recipe.model.source)
        return manifest_of_recipe(recipe, model_dir), model_dir
    run = held_run(plan.data_dir, plan.run)
    return run.record, plan.model or newest_policy(plan.data_dir, run.id).path


def manifest_of_recipe(recipe: Recipe, model_dir: Path) -> Manifest:
    """The rules that a recipe's run would have, signed by nobody."""
    nobody = PeerId(bytes(32))
    return manifest_from_recipe(
        recipe,
        model_dir,
        trainer=nobody,
        validators=[nobody],
        name=recipe.name,
        issued_at_ms=0,
        recipe_digest=bytes(32),
    )


async def _measure(plan: Plan, manifest: Manifest, model_dir: Path, say: Say) -> list[dict[str, Any]]:
    compute = ComputeProcess(
        "node.calibrate_compute",
        name="calibration",
        log_path=plan.data_dir / "calibrate.log",
        threads=plan.threads,
        env={"INTELLECT_THREADS": str(plan.threads)},
    )
    share = -(-plan.rollouts // len(BATCHES))
    found = []
    async with trio.open_nursery() as nursery:
        await nursery.start(compute.run)
        for batch in BATCHES:
            say(f"{share} answers in {plan.dtype}, {batch} at a time …")
            sample = await compute.call(
                "measure",
                timeout_s=MEASURE_TIMEOUT_S,
                model_dir=str(model_dir),
                manifest=msgspec.msgpack.encode(manifest),
                dtype=plan.dtype,
                device=plan.device,
                engine=plan.engine,
                batch=batch,
                rollouts=share,
                first=1000 * batch,
            )
            found.append({"batch": batch, **sample})
        nursery.cancel_scope.cancel()
    return found


def _summary(plan: Plan, manifest: Manifest, model_dir: Path, found: Sequence[dict[str, Any]]) -> Calibration:
    tolerance = manifest.tolerances.get(plan.dtype)
    merged = {name: [value for one in found for value in one["values"][name]] for name in LABELS}
    quantities = [quantity(name, merged[name], tolerance) for name in LABELS]
    samples = [msgspec.convert(one, Sample) for one in found]
    reasons = [reason for sample in samples for reason in sample.rejected]
    outcome, advice = judge(quantities, reasons, dtype=plan.dtype, listed=sorted(manifest.tolerances))
    answers = sum(sample.rollouts for sample in samples)
    if outcome == "safe" and most_rejected(answers) > SURE:
        outcome, advice = "too few to say", f"calibrate again with --rollouts {_answers_needed()} or more"
    return Calibration(
        outcome=outcome,
        advice=advice,
        answers=answers,
        at_most=most_rejected(answers),
        made_at_ms=now_ms(),
        software=SOFTWARE,
        run=manifest.name,
        model=str(model_dir),
        engine=found[0]["engine"],
        dtype=plan.dtype,
        device=plan.device,
        threads=plan.threads,
        samples=samples,
        quantities=quantities,
    )


def quantity(name: str, values: Sequence[float], tolerance: Tolerance | None) -> Quantity:
    """Summarise what was measured against one limit of a tolerance."""
    every = np.array(values, dtype=np.float64)
    limit = None if tolerance is None else float(getattr(tolerance, name))
    scale = limit or float(every.max()) or 1.0
    places = np.minimum(every / scale * _PLOT_BINS, _PLOT_BINS).astype(int)
    places[(places == _PLOT_BINS) & (every <= scale)] = _PLOT_BINS - 1  # on the limit is within it
    return Quantity(
        name=name,
        limit=limit,
        median=float(np.median(every)),
        p99=float(np.quantile(every, 0.99)),
        largest=float(every.max()),
        mean=float(every.mean()),
        histogram=np.bincount(places, minlength=_PLOT_BINS + 1).tolist(),
    )


def judge(
    quantities: Sequence[Quantity], rejected: Sequence[str], *, dtype: str, listed: Sequence[str]
) -> tuple[Outcome, str]:
    """What the numbers and the reasons of rejected submissions come to, and what to do next."""
    if dtype not in listed:
        return "would be rejected", f"the run takes no {dtype}: start the node with --dtype {listed[0]}"
    others = [each for each in listed if each != dtype]
    another = f"calibrate again with --dtype {' or '.join(others)}" if others else "calibrate on another machine"
    suspect = [each for each in quantities if each.name.startswith("honest_") and each.share > 1]
    if rejected or suspect:
        why = rejected[0] if rejected else f"history: {LABELS[suspect[0].name]} of {suspect[0].mean:.3g}"
        return "would be rejected", (
            f"{why}: {another}; if float32 on the CPU fails too, this machine computes wrongly (memory, overclocking) "
            "or its torch is damaged"
        )
    tight = [LABELS[each.name] for each in quantities if each.share > _tight_from(each)]
    if tight:
        return "tight", f"{', '.join(tight)} near the limit; a rejection now and then costs only that work: {another}"
    return "safe", f"start the node with --dtype {dtype}"


def most_rejected(answers: int) -> float:
    """The share p of answers that would be rejected, at most, where none of n was: (1 - p)^n = 1 - confidence."""
    return float(1 - (1 - CONFIDENCE) ** (1 / answers))


def _answers_needed() -> int:
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(1 - SURE)))


def _tight_from(each: Quantity) -> float:
    return TIGHT_MEAN if each.name.startswith("honest_") else TIGHT_MAXIMUM


def show(calibration: Calibration, console: Console) -> None:
    """Print a calibration for a person."""
    console.print(Group(_settings(calibration), _distribution(calibration), _outcome(calibration)))


def _settings(calibration: Calibration) -> Table:
    title = f"{calibration.run}: {calibration.engine} {calibration.dtype} on {calibration.device}"
    table = Table(
        "at a time", "rollouts", "tokens", "same token", "tokens/s", title=title, title_justify="left", box=None
    )
    for sample in calibration.samples:
        speed = sample.tokens / max(sample.generate_s, 1e-9)
        cells = (sample.batch, sample.rollouts, sample.tokens, f"{sample.match:.3%}", f"{speed:.0f}")
        table.add_row(*map(str, cells))
    return table


def _distribution(calibration: Calibration) -> Table:
    table = Table("", "median", "99 %", "most", "limit", "used", "0…limit│beyond", box=None)
    for each in calibration.quantities:
        limit, share = ("none", "") if each.limit is None else (f"{each.limit:.3g}", f"{each.share:.0%}")
        most = f"⌀ {each.mean:.2g}" if each.name.startswith("honest_") else f"{each.largest:.2g}"
        table.add_row(
            Text(LABELS[each.name], no_wrap=True),
            *(f"{each.median:.2g}", f"{each.p99:.2g}", most, limit),
            Text(share, style="red" if each.share > 1 else ""),
            Text(plot(each.histogram), no_wrap=True),
        )
    return table


def plot(counts: Sequence[int]) -> str:
    """Counts as blocks of rising height, by their logarithm so that a single one shows; a bar before the last."""
    top = max(np.log1p(counts).max(), 1e-9)
    blocks = [_BLOCKS[int(np.ceil(np.log1p(count) / top * (len(_BLOCKS) - 1)))] for count in counts]
    return f"{''.join(blocks[:-1])}│{blocks[-1]}"


def _outcome(calibration: Calibration) -> Text:
    style = {"safe": "bold green", "would be rejected": "bold red"}.get(calibration.outcome, "bold yellow")
    return Text.assemble((calibration.outcome, style), f": {how_sure(calibration)}\n  next: {calibration.advice}")


def how_sure(calibration: Calibration) -> str:
    """What the number of answers allows to say."""
    rejected = sum(len(sample.rejected) for sample in calibration.samples)
    if rejected:
        return f"validators would reject {rejected} of the submissions that these {calibration.answers} answers make"
    return (
        f"none of {calibration.answers} answers would be rejected, so with 95 % confidence at most "
        f"{calibration.at_most:.2%} of all would be"
    )
