"""`intellect-node data filter`: which tasks can a policy learn from? (INTELLECT-2, section 4.1: offline filtering)

Has the first policy answer each of many tasks several times, and keeps the tasks that it solves sometimes: one that it
never solves gives no signal, one that it always solves has nothing to teach. What is kept is a pool (protocol.pools).
The computing is done in a process of its own (node.data_filter_compute); nothing is written before the end.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from rich.console import Console
from rich.table import Table

from environments.registry import get_environment
from node.compute.process import ComputeProcess
from node.run_create import model_directory
from protocol.atomic import write_atomically
from protocol.constants import MAX_POOL_TASKS
from protocol.errors import ConfigError, DataDirError
from protocol.pools import MAX_SAMPLES, encode_pool
from trainer.recipe import EnvironmentChoice, load_recipe

MAX_PROMPTS: Final = 1 << 24
ROLLOUTS_PER_CALL: Final = 1024
CALL_TIMEOUT_S: Final = 24 * 3600.0
MAX_NEW_TOKENS: Final = 1024
"""Unless given, or half of what the model takes if that is less."""
SAY_EVERY_S: Final = 5.0

Say = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to filter. A recipe gives environment, model, temperature and length where they are not given."""

    out: Path
    prompts: int
    environment: str | None = None
    model: str | None = None
    recipe: str | None = None
    samples: int = 8
    keep: str = "1..4"
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: str = "pool"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1


class Filtered(msgspec.Struct, frozen=True):
    """What a filtering found."""

    out: str
    environment: str
    model: str
    tasks: int
    kept: int
    samples: int
    solved: list[int]
    """Tasks by how many of their answers were right, 0 … samples."""
    undecided: int
    """Tasks of which an answer could not be judged; not kept."""
    seconds: float
    tokens: int


class _Subject(msgspec.Struct, frozen=True):
    """What the compute process needs to know; see its `open`."""

    environment: EnvironmentChoice
    model_dir: str
    samples: int
    temperature: float
    max_new_tokens: int | None
    seed: str


def filter_tasks(plan: Plan, say: Say) -> Filtered:
    """Measure, keep, write the pool. Raises NodeError: of setting, environment, model, computing or disk."""
    low, high = keep_band(plan.keep, samples=plan.samples)
    if not 1 <= plan.prompts <= MAX_PROMPTS:
        raise ConfigError(f"--prompts {plan.prompts} is out of bounds", hint=f"give 1 to {MAX_PROMPTS}")
    if not plan.out.parent.is_dir():
        raise ConfigError(f"there is no directory {plan.out.parent} to write {plan.out.name} into")
    subject = _subject(plan)
    started = time.monotonic()
    found = trio.run(_measure, plan, subject, say)
    solved = [count for _, count in found.tasks]
    kept = [(seed, count) for seed, count in found.tasks if count is not None and low <= count <= high]
    if not 1 <= len(kept) <= MAX_POOL_TASKS:
        raise ConfigError(
            f"{len(kept)} of {len(solved)} tasks were solved {low} to {high} times of {plan.samples} "
            f"({_histogram_text(solved, plan.samples)}); a pool has 1 to {MAX_POOL_TASKS}",
            hint="give another --keep, --prompts or --model",
        )
    try:
        write_atomically(plan.out, encode_pool(found.environment, samples=plan.samples, tasks=kept))
    except OSError as error:
        raise DataDirError(f"{plan.out} cannot be written: {error.strerror}") from error
    counts = Counter(solved)
    return Filtered(
        out=str(plan.out),
        environment=subject.environment.name,
        model=subject.model_dir,
        tasks=len(solved),
        kept=len(kept),
        samples=plan.samples,
        solved=[counts[times] for times in range(plan.samples + 1)],
        undecided=counts[None],
        seconds=time.monotonic() - started,
        tokens=found.tokens,
    )


def keep_band(text: str, *, samples: int) -> tuple[int, int]:
    """The bounds of `LOW..HIGH`, both kept. Raises ConfigError."""
    if not 1 <= samples <= MAX_SAMPLES:
        raise ConfigError(f"--samples {samples} is out of bounds", hint=f"give 1 to {MAX_SAMPLES}")
    match = re.fullmatch(r"([0-9]{1,3})\.\.([0-9]{1,3})", text)
    if match is None or not 0 <= (low := int(match[1])) <= (high := int(match[2])) <= samples:
        raise ConfigError(
            f"--keep {text[:40]!r} is no band of how many of {samples} answers are right",
            hint=f"give LOW..HIGH, for example 1..{max(1, samples // 2)}",
        )
    return low, high


def _subject(plan: Plan) -> _Subject:
    recipe = None if plan.recipe is None else load_recipe(plan.recipe)
    environment = None if recipe is None else recipe.environment
    if plan.environment is not None:
        get_environment(plan.environment)  # an unknown name is refused before anything is started
        environment = EnvironmentChoice(name=plan.environment)
    model = plan.model or (None if recipe is None else recipe.model.source)
    if environment is None or model is None:
        raise ConfigError(
            "which environment and which model?", hint="give --env NAME and --model DIR-OR-NAME, or --recipe NAME"
        )
    rollout = None if recipe is None else recipe.rollout
    return _Subject(
        environment=environment,
        model_dir=str(model_directory(model)),
        samples=plan.samples,
        temperature=plan.temperature or (1.0 if rollout is None else rollout.temperature),
        max_new_tokens=plan.max_new_tokens or (None if rollout is None else rollout.max_new_tokens),
        seed=plan.seed,
    )


class _Found(msgspec.Struct):
    environment: bytes
    tasks: list[tuple[bytes, int | None]] = []
    tokens: int = 0


async def _measure(plan: Plan, subject: _Subject, say: Say) -> _Found:
    log_path = plan.out.with_name(f"{plan.out.name}.log")
    compute = ComputeProcess(
        "node.data_filter_compute",
        name="filter",
        log_path=log_path,
        threads=plan.threads,
        env={
            "INTELLECT_THREADS": str(plan.threads),
            "INTELLECT_DTYPE": plan.dtype,
            "INTELLECT_DEVICE": plan.device,
        },
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(compute.run)
        opened = await compute.call("open", timeout_s=CALL_TIMEOUT_S, subject=msgspec.to_builtins(subject))
        found = _Found(opened["environment"])
        await _solve_all(compute, plan, found, say)
        nursery.cancel_scope.cancel()
    log_path.unlink(missing_ok=True)
    return found


async def _solve_all(compute: ComputeProcess, plan: Plan, found: _Found, say: Say) -> None:
    share = max(1, ROLLOUTS_PER_CALL // plan.samples)
    began = said = time.monotonic()
    for first in range(0, plan.prompts, share):
        count = min(share, plan.prompts - first)
        answer: dict[str, Any] = await compute.call("solve", timeout_s=CALL_TIMEOUT_S, first=first, count=count)
        found.tasks += [(seed, solved) for seed, solved in answer["tasks"]]
        found.tokens += answer["tokens"]
        done, now = len(found.tasks), time.monotonic()
        if now - said >= SAY_EVERY_S or done == plan.prompts:
            said, rate = now, done / max(now - began, 1e-9)
            left_s = (plan.prompts - done) / rate
            say(f"{done} of {plan.prompts} tasks, {rate:.1f} tasks/s, {left_s:.0f} s left")


def _histogram_text(solved: Sequence[int | None], samples: int) -> str:
    counts = Counter(solved)
    return ", ".join(f"{times}: {counts[times]}" for times in range(samples + 1) if counts[times])


def show(found: Filtered, console: Console) -> None:
    """Print what a filtering found for a person."""
    table = Table("right answers", "tasks", "share", box=None)
    for times, count in enumerate(found.solved):
        table.add_row(f"{times} of {found.samples}", str(count), f"{count / found.tasks:.1%}")
    if found.undecided:
        table.add_row("could not tell", str(found.undecided), f"{found.undecided / found.tasks:.1%}")
    console.print(f"{found.environment} by {found.model}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    rate = found.tasks / max(found.seconds, 1e-9)
    console.print(
        f"{found.kept} of {found.tasks} tasks kept in {found.out} ({rate:.1f} tasks/s, {found.tokens} tokens)\n"
        f'  next: name it in the recipe: [environment] pools = [{{file = "{found.out}", from_step = 0}}]',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
