"""The commands about environments: `env list`, `env show`, `env try`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from node.commands.common import JsonOption, emit
from node.logs import set_up_logging

env_app = typer.Typer(no_args_is_help=True, help="Look at the environments that are installed, and try them.")

NameArgument = Annotated[str, typer.Argument(help="Name of an environment; `env list` shows them.")]


@env_app.command("list")
def list_environments(as_json: JsonOption = False) -> None:
    """List the environments that are installed here."""
    from rich.console import Console

    from node.env_show import describe_environments, show_environments

    set_up_logging("warning")
    found = describe_environments()
    emit(found, as_json=as_json, show=lambda _: show_environments(found, Console()))


@env_app.command("show")
def show_one(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show an environment: what it is, what it needs, and the parameters that a recipe may set."""
    from rich.console import Console

    from node.env_show import describe_environment, show_environment

    set_up_logging("warning")
    found = describe_environment(name)
    emit(found, as_json=as_json, show=lambda _: show_environment(found, Console()))


@env_app.command("try")
def try_one(
    name: NameArgument,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63, help="Which task.")] = 0,
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", help="NAME=JSON of the environment; may be given again.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="A data file, as environment.data in a recipe.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="An answer to judge.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw one task and show it, and the reward of an answer if one is given."""
    from rich.console import Console

    from node.env_show import show_trial, try_environment

    set_up_logging("warning")
    trial = try_environment(name, seed=seed, parameters=parameter or [], data=data, answer=answer)
    emit(msgspec.to_builtins(trial), as_json=as_json, show=lambda _: show_trial(trial, Console()))
