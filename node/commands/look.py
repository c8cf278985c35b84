"""The commands that look at a node and at what it knows: status, peers, logs, dht, verdict."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from node.commands.common import (
    BootstrapOption,
    DataDirOption,
    JsonOption,
    RunOption,
    begin,
    begin_anywhere,
    emit,
    run_and_peers,
)
from protocol.errors import ConfigError

dht_app = typer.Typer(no_args_is_help=True, help="Look into the DHT that runs are found through.")
verdict_app = typer.Typer(no_args_is_help=True, help="Look into what validators said.")

TimeoutOption = Annotated[
    float, typer.Option("--timeout-s", min=1, max=300, help="Seconds to look for; starting takes a second or two more.")
]


def register(app: typer.Typer) -> None:
    app.command("status")(show_status)
    app.command("peers")(show_peers)
    app.command("logs")(show_logs)
    app.add_typer(dht_app, name="dht")
    app.add_typer(verdict_app, name="verdict")


def show_status(
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second until Ctrl-C.")] = False,
) -> None:
    """Show what a node does, what became of its work, and what to do next."""
    from node.status_view import fetch_status, print_status, watch_status, with_advice

    directory = begin(data_dir)
    if watch and as_json:
        raise ConfigError("--watch and --json exclude each other", hint="call `status --json` in a loop")
    if watch:
        watch_status(directory)
    else:
        emit(with_advice(fetch_status(directory)), as_json=as_json, show=print_status)


def show_peers(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Show whom a node knows in the DHT, whether others reach it, and who misbehaved."""
    from node.peers_show import describe_discovery, print_discovery

    emit(describe_discovery(begin(data_dir)), as_json=as_json, show=print_discovery)


def show_logs(
    data_dir: DataDirOption = None,
    level: Annotated[str, typer.Option("--level", help="Least important: debug, info, warning or error.")] = "info",
    since: Annotated[
        str | None, typer.Option("--since", help="90s, 30m, 12h, 7d, or a time as 2026-01-31T12:00:00Z.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="At most so many of the newest; 0: all.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is logged, until Ctrl-C.")] = False,
    of: Annotated[str, typer.Option("--of", help="node, or a helper process: compute, screening, reader …")] = "node",
) -> None:
    """Show what a node logged."""
    from node.log_view import Filter, follow_log, read_log

    directory = begin(data_dir)
    wanted = Filter.parse(level=level, since=since)
    for line in read_log(directory, of, wanted, newest=lines):
        typer.echo(line)
    if follow:
        for line in follow_log(directory, of, wanted):
            typer.echo(line)


@dht_app.command("find")
def find_in_dht(
    run: RunOption = None,
    bootstrap: BootstrapOption = None,
    data_dir: DataDirOption = None,
    timeout_s: TimeoutOption = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Look for a run and its relays, as a node that joins does."""
    from node.dht_show import find_run, print_run

    run, peers = run_and_peers(run, bootstrap)
    found = find_run(begin_anywhere(data_dir), run=run, bootstrap=peers, timeout_s=timeout_s)
    emit(found, as_json=as_json, show=print_run)
    raise typer.Exit(0 if found["manifest"] and found["relays"] else 1)


@dht_app.command("get")
def get_from_dht(
    key: Annotated[str, typer.Argument(help="`run`, a relay's peer id, or a whole key /intellect/…")],
    run: RunOption = None,
    bootstrap: BootstrapOption = None,
    data_dir: DataDirOption = None,
    timeout_s: TimeoutOption = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Get one record from several peers and show the newest: who signed it, since when, until when."""
    from node.dht_show import get_record, print_record

    run, peers = run_and_peers(run, bootstrap)
    found = get_record(begin_anywhere(data_dir), key, run=run, bootstrap=peers, timeout_s=timeout_s)
    emit(found, as_json=as_json, show=print_record)
    raise typer.Exit(0 if found["record"] else 1)


@verdict_app.command("show")
def show_verdict(
    submission: Annotated[
        str, typer.Argument(help="A submission's id or its first digits, `last`, or a file that holds a verdict.")
    ],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a verdict: outcome, reason, what was measured and what is allowed. Looks into any role's data directory."""
    from node.verdict_show import describe_verdict, find_verdicts, print_verdict

    found = find_verdicts(submission, begin_anywhere(data_dir))
    if as_json:
        return typer.echo(json.dumps([describe_verdict(one) for one in found]))
    for one in found:
        print_verdict(one)
