"""The commands about taking part: `invite create` for operators, `appeal` for contributors."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.common import BootstrapOption, DataDirOption, JsonOption, begin, emit, say
from node.config import passphrase_from

invite_app = typer.Typer(no_args_is_help=True, help="Invite people to a run that takes only who was invited.")


def register(app: typer.Typer) -> None:
    app.add_typer(invite_app, name="invite")
    app.command("appeal")(appeal_verdict)


@invite_app.command("create")
def create_invites(
    out: Annotated[Path, typer.Option("--out", help="Directory for the files, one for each invite.")],
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="How many.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0.01, max=3650, help="Days that they are good for.")] = 30.0,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign invites with the operator's key; each lets one node in: start it with --invite FILE."""
    from node.admission.invites import create_invites as create
    from node.identity import KEY_FILE, load_identity

    directory = begin(data_dir)
    identity = load_identity(directory / KEY_FILE, passphrase=passphrase_from(os.environ))
    made = create(directory, identity, out, count=count, days=days, now_ms=time.time_ns() // 1_000_000)
    emit(made, as_json=as_json, show=_print_files)


def _print_files(made: dict[str, Any]) -> None:
    for path in made["files"]:
        typer.echo(path)


def appeal_verdict(
    submission: Annotated[
        str,
        typer.Argument(
            help="The submission's id or its first digits; `last`: what evicted the node, or the newest rejection."
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", help="Why the verdict is wrong, for people.")] = "",
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, max=86400, help="Seconds to wait for the answer; 0: hand in only.")
    ] = 300.0,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a rejected submission judged by other validators; an eviction that was wrong is taken back."""
    from node.appeal import appeal, find_rejections
    from node.identity import KEY_FILE, load_identity

    directory = begin(data_dir)
    rejections = find_rejections(directory, submission)
    found = appeal(
        directory,
        load_identity(directory / KEY_FILE, passphrase=passphrase_from(os.environ)),
        rejections,
        reason=reason[:1000],
        bootstrap=bootstrap or [],
        wait_s=wait_s,
        say=say,
    )
    emit(found, as_json=as_json, show=lambda one: typer.echo(f"{one['appeal']}: {one['state']}"))
    raise typer.Exit(1 if found["state"] in ("refused", "undecided") else 0)
