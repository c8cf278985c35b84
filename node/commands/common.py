"""What all commands share: their options, the data directory they are about, and how they print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from node.config import choices
from node.homes import chosen_home, home_or_new
from node.logs import set_up_logging
from node.run_link import RunLink
from protocol.errors import ConfigError, MalformedError

T = TypeVar("T")

DATA_DIR_HELP = "The node's data directory. Default: the only one there is on this computer."
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help=DATA_DIR_HELP, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RUN_HELP = "Address of the run, alone or with peers: ADDRESS@MULTIADDR[,MULTIADDR]."
RunOption = Annotated[
    str | None, typer.Option("--run", help=f"{RUN_HELP} Default: the directory's.", show_default=False)
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


def run_and_peers(run: str | None, bootstrap: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """`--run` without the peers in it, and all peers there are. Raises ConfigError."""
    if run is None:
        return None, [*(bootstrap or ())]
    link = parsed(RunLink.parse, run, what="--run")
    return str(link.address), [*dict.fromkeys([*link.peers, *(bootstrap or ())])]


def one_of(setting: str) -> Callable[[str | None], str | None]:
    """Checks an option that a setting has too: its value is one of the setting's. Raises ConfigError."""

    def check(given: str | None) -> str | None:
        if given is not None and given not in choices(setting):
            raise ConfigError(f"--{setting}: {given[:80]!r} is none of {', '.join(choices(setting))}")
        return given

    return check


def answer(question: Callable[[], T], *, instead: str) -> T:
    """Ask at the terminal. Raises ConfigError, with what to give `instead`, where nobody is there to answer."""
    try:
        if sys.stdin is not None:
            return question()
    except typer.Abort:
        if sys.stdin.isatty():
            raise  # Ctrl-C at the question
        say("")
    raise ConfigError("there is a question, and no terminal to ask it at", hint=instead)


def parsed(parse: Callable[[str], T], text: str, *, what: str) -> T:
    """A value of the command line that has a syntax of its own. Raises ConfigError, which is a usage error."""
    try:
        return parse(text)
    except MalformedError as error:
        raise ConfigError(f"{what}: {error.message}", hint=error.hint) from error
