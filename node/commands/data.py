"""The commands about the tasks of a run: `data filter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from node.commands.common import JsonOption, emit, one_of, say
from node.logs import set_up_logging

data_app = typer.Typer(no_args_is_help=True, help="Choose the tasks of a run.")


def register(app: typer.Typer) -> None:
    app.add_typer(data_app, name="data")


@data_app.command("filter")
def filter_data(
    prompts: Annotated[int, typer.Option("--prompts", help="How many tasks to try.")],
    out: Annotated[Path, typer.Option("--out", help="The pool file to write.")],
    env: Annotated[str | None, typer.Option("--env", help="Name of the environment.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Directory, shipped policy or Hugging Face id.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="A recipe that says what the others do not.")] = None,
    samples: Annotated[int, typer.Option("--samples", help="Answers to each task.")] = 8,
    keep: Annotated[str, typer.Option("--keep", help="Keep tasks with LOW..HIGH right answers.")] = "1..4",
    temperature: Annotated[float | None, typer.Option("--temperature", min=1e-3, max=10)] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    seed: Annotated[str, typer.Option("--seed", help="Another text draws other tasks.")] = "pool",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Number format: float32 or bfloat16.", callback=one_of("dtype"))
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="What to generate on: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: as torch chooses.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Keep the tasks that a policy solves sometimes, as a pool file that recipes name."""
    from rich.console import Console

    from node.data_filter import Plan, filter_tasks, show

    set_up_logging("warning")
    plan = Plan(
        out=out, prompts=prompts, environment=env, model=model, recipe=recipe, samples=samples, keep=keep,
        temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, dtype=dtype, device=device, threads=threads,
    )  # fmt: skip
    found = filter_tasks(plan, say)
    emit(msgspec.to_builtins(found), as_json=as_json, show=lambda _: show(found, Console()))
