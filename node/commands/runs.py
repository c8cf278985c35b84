"""The commands about runs: `run create`, `run publish`, `run list`, `run show`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from node.commands.common import BootstrapOption, DataDirOption, JsonOption, begin, emit, parsed, say
from node.config import passphrase_from
from node.logs import set_up_logging
from node.run_link import check_peer, join_line

run_app = typer.Typer(no_args_is_help=True, help="Create a run, publish it, show it, or list those known here.")


@run_app.command("create")
def create_run(
    recipe: Annotated[str, typer.Option("--recipe", help="A shipped recipe's name, or a TOML file.")],
    validator: Annotated[
        list[str] | None, typer.Option("--validator", help="Peer id of a validator; may be given again.")
    ] = None,
    data_dir: DataDirOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run.", show_default="the recipe's")] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option("--bootstrap", help="A relay's multiaddr, for the line that contributors join with."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the run would need, without its weights; make nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a run, with this data directory's key as its operator and trainer; print its address."""
    set_up_logging("warning")
    if dry_run:
        return _show_plan(recipe, as_json=as_json)
    from node.run_create import require_validators
    from node.run_make import RunOrder, make_run
    from node.run_membership import admission_warning
    from protocol.identity import PeerId

    peers = bootstrap or []
    for peer in peers:
        parsed(check_peer, peer, what="--bootstrap")
    validators = [parsed(PeerId.parse, text, what="--validator") for text in validator or []]
    require_validators(validators)
    made = make_run(
        RunOrder(recipe, validators, name=name, data_dir=data_dir),
        issued_at_ms=time.time_ns() // 1_000_000,
        passphrase=passphrase_from(os.environ),
        environ=os.environ,
    )
    address = str(made.run.address)
    if warning := admission_warning(made.run.manifest.record.admission):
        say(warning)
    say(_what_follows(made.home, address, peers))
    shown = {"run": address, "run_id": made.run.manifest.id.hex(), "data_dir": str(made.home)}
    shown |= {"join": join_line(address, peers)} if peers else {}
    emit(shown, as_json=as_json, show=lambda _: typer.echo(address))


def _what_follows(home: Path, address: str, peers: list[str]) -> str:
    """The commands that bring a new run up, and the one that its operator hands on."""
    relay = peers or ["<relay>"]
    lines = [
        f"the run is in {home}; what follows:",
        f"  trainer: intellect-node --data-dir {home} --bootstrap {relay[0]}",
        f"  contributors join with: {join_line(address, relay)}",
    ]
    if not peers:
        lines.insert(1, f"  first a relay, which prints its <relay>: intellect-node --role relay --run {address}")
    return "\n".join(lines)


def _show_plan(recipe: str, *, as_json: bool) -> None:
    from node.run_plan import plan_lines, plan_run

    emit(plan_run(recipe), as_json=as_json, show=lambda plan: typer.echo("\n".join(plan_lines(plan))))


@run_app.command("publish")
def publish_run(
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, max=300, help="Seconds to try for.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Put the way to a run into the DHT for ten minutes, before its trainer runs, which keeps it there."""
    from node.run_publish import print_published
    from node.run_publish import publish_run as publish

    found = publish(
        begin(data_dir), bootstrap=bootstrap or [], timeout_s=timeout_s, passphrase=passphrase_from(os.environ)
    )
    emit(found, as_json=as_json, show=print_published)


@run_app.command("list")
def list_runs(as_json: JsonOption = False) -> None:
    """List the runs that this user's nodes are in, and whether they run now."""
    from node.run_list import describe_homes, print_homes

    set_up_logging("warning")
    emit(describe_homes(os.environ), as_json=as_json, show=print_homes)


@run_app.command("show")
def show_run(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Show the run that a data directory belongs to: everything that its manifest fixes."""
    from node.run_show import describe_run, known_run

    emit(describe_run(known_run(begin(data_dir))), as_json=as_json, show=_print_fields)


def _print_fields(fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        typer.echo(f"{key} = {value if isinstance(value, str) else json.dumps(value)}")
