"""The command that looks on: it follows a run without a role and shows it on a page of this computer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.common import RUN_HELP, BootstrapOption
from node.commands.settings import resolved_settings
from node.config import describe
from node.logs import set_up_logging


def register(app: typer.Typer) -> None:
    app.command("watch")(watch_run)


def watch_run(
    run: Annotated[str | None, typer.Option("--run", help=RUN_HELP, show_default=False)] = None,
    bootstrap: BootstrapOption = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Where its copy of the ledger lies. Default: one a run.", show_default=False),
    ] = None,
    status_port: Annotated[
        int | None, typer.Option("--status-port", help=describe("status_port"), show_default=False)
    ] = None,
) -> None:
    """Follow a run without a role, on a page of this computer: rewards, standings, verdicts, rollouts."""
    given: dict[str, Any] = {"role": "watch", "run": run, "bootstrap": bootstrap, "status_port": status_port}
    if data_dir is not None:
        given["data_dir"] = str(data_dir)
    resolved = resolved_settings(given)
    set_up_logging(resolved.config.log_level)
    from node.start import start_node

    raise typer.Exit(start_node(resolved.config))
