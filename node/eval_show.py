"""What `intellect-node eval` does with its arguments, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.benchmarks import (
    Benchmark,
    Harness,
    Score,
    lacking_lines,
    list_tasks,
    load_table,
    run_tasks,
    split_table,
    table_names,
)
from protocol.errors import ConfigError
from trainer.evaluation import Evaluation
from trainer.export import export_policy

if TYPE_CHECKING:
    from node.eval_compute import Plan


def parse_parameters(texts: Sequence[str]) -> dict[str, Any]:
    """`NAME=JSON` of each text. Raises ConfigError."""
    parameters = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            parameters[name] = json.loads(value)
        except ValueError as error:
            raise ConfigError(
                f"--parameter {text[:80]!r} is not NAME=JSON{'' if equals else ': there is no ='}",
                hint="for example --parameter largest=30",
            ) from error
    return parameters


def show_environment(plan: Plan, *, as_json: bool) -> None:
    """Evaluate on an environment and print the result. Raises as `evaluate_environment` does."""
    from node.eval_compute import evaluate_environment

    def progress(done: int, of: int) -> None:
        sys.stderr.write(f"\r{done}/{of} answers" + ("\n" if done == of else ""))

    found = evaluate_environment(plan, progress=progress if sys.stderr.isatty() else None)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found)) + "\n")
    else:
        Console().print(evaluation_table(found, title=f"{plan.model} on {plan.environment}"))


def show_tasks(tasks: str, harness: Harness, *, as_json: bool) -> int:
    """Run benchmarks and print their results; the exit code, 1 when something that was asked for was not run."""
    if tasks == "list":
        sys.stdout.write(list_tasks())
        return 0
    names = [name for name in tasks.split(",") if name]
    lacking: list[Benchmark] = []
    if tasks in table_names():
        table = load_table(tasks)
        here, lacking = split_table(table, os.environ)
        if harness.download:
            here, lacking = [one for one in table if one.task], [one for one in table if not one.task]
        names = [one.task for one in here]
    scores = _run(names, harness) if names or not lacking else []
    if as_json:
        shown = {"scores": msgspec.to_builtins(scores), "not_run": msgspec.to_builtins(lacking)}
        sys.stdout.write(json.dumps(shown) + "\n")
    else:
        if scores:
            Console().print(scores_table(scores))
        sys.stdout.writelines(f"{line}\n" for line in lacking_lines(lacking))
    return 1 if lacking else 0


def _run(names: Sequence[str], harness: Harness) -> list[Score]:
    if (harness.model / "tokenizer_config.json").exists():
        return run_tasks(names, harness)
    with tempfile.TemporaryDirectory(prefix="policy-") as work:  # as transformers wants it
        exported = export_policy(harness.model, Path(work) / "model")
        return run_tasks(names, dataclasses.replace(harness, model=exported))


def evaluation_table(found: Evaluation, *, title: str) -> Table:
    """pass@k of one policy on one environment."""
    table = Table("measure", "value", "95 % interval", title=Text(title), box=None)
    for one in found.pass_at:
        table.add_row(f"pass@{one.k}", f"{one.value:.3f}", f"{one.low:.3f} to {one.high:.3f}")
    table.add_row("mean reward", f"{found.reward:.3f}", "")
    table.add_row("mean tokens", f"{found.tokens:.1f}", "")
    table.add_row("cut at the limit", f"{found.truncated:.1%}", "")
    if found.unknown:
        table.add_row("not to be judged", str(found.unknown), "counted as wrong")
    table.add_row("prompts × answers", f"{found.prompts} × {found.samples}", "")
    return table


def scores_table(scores: Sequence[Score]) -> Table:
    """Results of lm-eval."""
    table = Table("task", "metric", "value", "95 % interval", box=None)
    for score in scores:
        interval = "" if score.low is None or score.high is None else f"{score.low:.3f} to {score.high:.3f}"
        table.add_row(Text(score.task), Text(score.metric), f"{score.value:.4f}", interval)
    return table
