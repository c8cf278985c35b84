"""The commands about settings: `config show` and `config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.common import JsonOption, emit
from node.commands.settings import masked, resolved_settings, with_settings
from node.config import Resolved, describe, file_settings, resolve, unit
from node.logs import set_up_logging
from protocol.identity import PeerId

config_app = typer.Typer(no_args_is_help=True, help="Show the settings that result, or check a file of them.")


@config_app.command("show")
@with_settings
def show_config(ctx: typer.Context, as_json: JsonOption = False, **given: Any) -> None:
    """Show every setting's value and where it comes from: default, file, environment or flag."""
    set_up_logging("warning")
    resolved = resolved_settings(given)
    emit(_described(resolved), as_json=as_json, show=lambda _: typer.echo(resolved.to_toml(), nl=False))


@config_app.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(help="TOML file of settings.")],
    as_json: JsonOption = False,
) -> None:
    """Check a file of settings: known names, kinds, bounds and addresses. Role and run may stand elsewhere."""
    set_up_logging("warning")
    said = file_settings(file)
    missing = {"role": "inference", "run": _SOME_RUN}
    resolve({}, file=file, environ={}, remembered=missing)
    found = {"file": str(file), "settings": len(said), "elsewhere": sorted(missing.keys() - said.keys())}
    emit(found, as_json=as_json, show=_print_checked)


_SOME_RUN = f"{PeerId(bytes(32))}/any"
"""Stands for the run that a file leaves out, so that everything else can be checked."""


def _described(resolved: Resolved) -> dict[str, Any]:
    return {
        name: {
            "value": masked(getattr(resolved.config, name)),
            "from": source,
            "unit": unit(name),
            "meaning": describe(name),
        }
        for name, source in resolved.sources.items()
    }


def _print_checked(found: dict[str, Any]) -> None:
    typer.echo(f"{found['file']}: {found['settings']} settings, all known and within bounds")
    for name in found["elsewhere"]:
        typer.echo(f"  {name} is not in it: give --{name} when you start the node")
