"""What all commands share: their options, the data directory they are about, and how they print."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from node.homes import chosen_home, home_or_new
from node.logs import set_up_logging
from protocol.errors import ConfigError, MalformedError

T = TypeVar("T")

DATA_DIR_HELP = "The node's data directory. Default: the only one there is on this computer."
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help=DATA_DIR_HELP, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunOption = Annotated[
    str | None, typer.Option("--run", help="Address of the run. Default: the directory's.", show_default=False)
]
BootstrapOption = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Peers to ask. Default: those this directory's node knows.", show_default=False),
]


def begin(data_dir: Path | None) -> Path:
    """Log warnings alone, and say which data directory a command is about. Raises ConfigError or DataDirError."""
    set_up_logging("warning")
    return chosen_home(data_dir, os.environ)


def begin_anywhere(data_dir: Path | None) -> Path:
    """The same for a command that needs no node: without one, the directory that the first node takes over."""
    set_up_logging("warning")
    return home_or_new(data_dir, os.environ)


def emit(value: Any, *, as_json: bool, show: Callable[[Any], object]) -> None:
    """Print a value of plain types as JSON, or have it shown to a person."""
    if as_json:
        typer.echo(json.dumps(value))
    else:
        show(value)


def say(line: str) -> None:
    """Progress of a command goes to stderr, so that what it finds can be piped."""
    typer.echo(line, err=True)


def parsed(parse: Callable[[str], T], text: str, *, what: str) -> T:
    """A value of the command line that has a syntax of its own. Raises ConfigError, which is a usage error."""
    try:
        return parse(text)
    except MalformedError as error:
        raise ConfigError(f"{what}: {error.message}", hint=error.hint) from error
