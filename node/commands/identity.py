"""The commands about a node's key: `id` and `id show`, `id export`, `id import`, `id rotate`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from node.commands.common import DataDirOption, JsonOption, answer, begin, emit, say
from node.config import passphrase_from
from node.homes import known_homes, named_home, ready_new
from node.logs import set_up_logging
from protocol.errors import ConfigError

id_app = typer.Typer(invoke_without_command=True, help="Show, back up, restore or replace a node's key.")

NewOption = Annotated[
    bool, typer.Option("--new", help="The key of the next node that is started without --data-dir; made when missing.")
]


@id_app.callback(invoke_without_command=True)
def default(
    ctx: typer.Context, data_dir: DataDirOption = None, new: NewOption = False, as_json: JsonOption = False
) -> None:
    """Print this node's peer id; create its key if there is none."""
    if ctx.invoked_subcommand is None:
        show_id(data_dir, new, as_json)
    elif data_dir or new or as_json:
        raise ConfigError(f"write flags after `id {ctx.invoked_subcommand}`, not before it")


@id_app.command("show")
def show_id(data_dir: DataDirOption = None, new: NewOption = False, as_json: JsonOption = False) -> None:
    """Print a node's peer id; create its key if there is none."""
    from node.identity import KEY_FILE, load_or_create_identity

    directory = _directory(data_dir, new=new)
    identity = load_or_create_identity(directory, passphrase=passphrase_from(os.environ))
    shown = {"peer_id": str(identity.peer_id), "key_file": str(directory / KEY_FILE)}
    emit(shown, as_json=as_json, show=lambda _: typer.echo(identity.peer_id))


@id_app.command("export")
def export_id(
    out: Annotated[Path, typer.Option("--out", help="The file to write; it must not exist.")],
    data_dir: DataDirOption = None,
    passphrase_file: Annotated[
        Path | None, typer.Option("--passphrase-file", help="Take the passphrase from a file's first line; else asked.")
    ] = None,
) -> None:
    """Write a copy of a node's key, encrypted with a passphrase, to keep in a safe place."""
    from node.key_care import export_key

    directory = begin(data_dir)
    passphrase = _passphrase(passphrase_file, confirm=True)
    peer_id = export_key(directory, out, passphrase=passphrase, own_passphrase=passphrase_from(os.environ))
    say(f"{out} holds the key of {peer_id}, encrypted; without the passphrase nobody can use it, you included")


@id_app.command("import")
def import_id(
    file: Annotated[Path, typer.Argument(help="A key file, as `id export` wrote it, or a copy of an identity.key.")],
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The data directory to put it into; it has none yet.")],
    passphrase_file: Annotated[
        Path | None, typer.Option("--passphrase-file", help="Take the passphrase from a file's first line; else asked.")
    ] = None,
) -> None:
    """Put a copy of a key back into a data directory."""
    from node.key_care import import_key, is_encrypted

    set_up_logging("warning")
    passphrase = _passphrase(passphrase_file, confirm=False) if is_encrypted(file) else ""
    directory = named_home(data_dir, {}) or data_dir
    peer_id = import_key(file, directory, passphrase=passphrase, own_passphrase=passphrase_from(os.environ))
    say(f"{directory} has the key of {peer_id} now; no other node may use it at the same time")


@id_app.command("rotate")
def rotate_id(
    data_dir: DataDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether credits and standing may be left.")] = False,
) -> None:
    """Give a node a new key. Credits and standing stay with the old one, which is kept beside it."""
    from node.key_care import rotate_key, what_is_left

    directory = begin(data_dir)
    passphrase = passphrase_from(os.environ)
    say(what_is_left(directory, passphrase=passphrase))
    if not yes and not answer(lambda: typer.confirm("Give it a new key?", err=True), instead="give --yes to say yes"):
        raise typer.Exit(1)
    typer.echo(rotate_key(directory, passphrase=passphrase))


def _directory(data_dir: Path | None, *, new: bool) -> Path:
    """The directory whose key is meant; where there is no node yet, the one that the first node takes over."""
    set_up_logging("warning")
    if new and data_dir is not None:
        raise ConfigError("--new and --data-dir name different keys", hint="give one of them")
    if not new and (named := named_home(data_dir, os.environ)):
        return named
    if new or not known_homes(os.environ):
        say("the next node that is started without --data-dir has this key")
        return ready_new(os.environ)
    return begin(None)


def _prompt(confirm: bool) -> str:
    return str(
        typer.prompt("Passphrase of the copy", hide_input=sys.stdin.isatty(), confirmation_prompt=confirm, err=True)
    )


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    if file is None:
        return answer(partial(_prompt, confirm), instead="give --passphrase-file FILE, its first line the passphrase")
    try:
        text = file.read_text(encoding="utf-8")[:4096].splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the passphrase file {file} cannot be read: {error}") from error
    if not text or not text[0]:
        raise ConfigError(f"the first line of {file} is empty", hint="write the passphrase there")
    return text[0]
