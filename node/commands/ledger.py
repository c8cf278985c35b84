"""The commands about the run's books: `audit`, `ledger show`, `ledger mine`, `ledger export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from node.commands.common import (
    BootstrapOption,
    DataDirOption,
    JsonOption,
    begin_anywhere,
    emit,
    parsed,
    run_and_peers,
    say,
)
from node.config import passphrase_from
from node.logs import set_up_logging
from protocol.errors import AuditError, ConfigError, NodeError

if TYPE_CHECKING:
    from node.ledger.show import Where
    from protocol.identity import PeerId

ledger_app = typer.Typer(no_args_is_help=True, help="Look into the ledger: who did what, and what it earned.")

RunOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="Fetch the ledger of this run from its relays: ADDRESS, or ADDRESS@MULTIADDR[,MULTIADDR]. "
        "Default: the directory's own copy.",
    ),
]
FromOption = Annotated[
    Path | None, typer.Option("--from", help="A data directory of any role, or what `ledger export` wrote; offline.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout-s", min=1, max=600, help="Seconds to look for the run.")]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", min=0, max=64, help="Processes that check signatures. Default: by size and cores."),
]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


TIMEOUT_S: Final = 30.0
EXIT_CODES: Final = {"clean": 0, "breaches": 1, "unconfirmed": 3}
"""Of an audit that could be made; AuditError has 2."""
KEPT_TIMEOUT_S: Final = 5.0
"""Where something can be shown without the run."""


def register(app: typer.Typer) -> None:
    app.command("audit")(audit_run)
    app.add_typer(ledger_app, name="ledger")


def audit_run(
    run: RunOption = None,
    bootstrap: BootstrapOption = None,
    source: FromOption = None,
    data_dir: DataDirOption = None,
    fork: Annotated[
        Path | None, typer.Option("--fork", help="Check a proof that a trainer signed two ledgers.")
    ] = None,
    recheck: Annotated[
        int, typer.Option("--recheck", min=0, help="Judge so many submissions again whose files and policies are here.")
    ] = 0,
    processes: ProcessesOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Check a run's ledger: signatures, rules, draws, balances, lineage.

    Exit 0: clean, 1: breaches, 2: could not, 3: no breach, but no head of the trainer's confirms the copy's end.
    """
    from node.ledger.show import audit, print_report

    if fork is not None:
        return _check_fork(fork, as_json=as_json)
    report = audit(
        _where(run, bootstrap, source, data_dir, timeout_s, processes, fails_as_audit=True), samples=recheck, say=say
    )
    found = msgspec.to_builtins(report) | {"clean": report.clean, "outcome": report.outcome}
    emit(found, as_json=as_json, show=lambda _: print_report(report))
    raise typer.Exit(EXIT_CODES[report.outcome])


def _check_fork(path: Path, *, as_json: bool) -> None:
    from node.ledger.show import describe_fork, open_fork, print_fork

    set_up_logging("warning")
    fork = open_fork(path)
    emit(describe_fork(fork), as_json=as_json, show=lambda _: print_fork(fork))
    raise typer.Exit(1)


@ledger_app.command("show")
def show_ledger(
    run: RunOption = None,
    bootstrap: BootstrapOption = None,
    source: FromOption = None,
    data_dir: DataDirOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many contributors.")] = 50,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show the leaderboard: contributors with their standing, credits, and what became of their work."""
    from node.ledger.rows import CONTRIBUTOR_COLUMNS, flat
    from node.ledger.show import print_csv, print_show, show

    _one_format(as_json, as_csv)
    found = show(_where(run, bootstrap, source, data_dir, timeout_s), limit=limit, say=say)
    if as_csv:
        return print_csv(CONTRIBUTOR_COLUMNS, [flat(row) for row in found["contributors"]], typer.echo)
    emit(found, as_json=as_json, show=print_show)


@ledger_app.command("mine")
def show_mine(
    peer: Annotated[
        str | None, typer.Option("--peer", help="Whose work. Default: the data directory's node.", show_default=False)
    ] = None,
    run: RunOption = None,
    bootstrap: BootstrapOption = None,
    source: FromOption = None,
    data_dir: DataDirOption = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout-s",
            min=1,
            max=600,
            show_default=False,
            help="Seconds to look for the run. Default: 30, and 5 where receipts are kept here.",
        ),
    ] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Show one contributor's work: every submission, what was said of it, what it earns."""
    from node.ledger.rows import SUBMISSION_COLUMNS
    from node.ledger.show import kept_alone, mine, print_csv, print_kept_alone, print_mine
    from node.receipts import kept_receipts, summary
    from protocol.identity import PeerId

    _one_format(as_json, as_csv)
    directory = None if peer else begin_anywhere(data_dir)
    whose = _own_peer(directory) if directory else parsed(PeerId.parse, peer or "", what="--peer")
    kept = [] if directory is None else kept_receipts(directory)
    has_other = bool(kept) and source is None and run is None and not bootstrap
    where = _where(
        run, bootstrap, source, None if source else data_dir, timeout_s or (KEPT_TIMEOUT_S if has_other else TIMEOUT_S)
    )
    try:
        found = mine(where, whose, say=say)
    except NodeError as error:
        if not has_other or where.has_own:
            raise
        alone = kept_alone(kept, error)
        if as_csv:
            say(alone["notes"][0])
            return print_csv(SUBMISSION_COLUMNS, [], typer.echo)
        return emit(alone, as_json=as_json, show=print_kept_alone)
    if as_csv:
        return print_csv(SUBMISSION_COLUMNS, found["submissions"], typer.echo)
    emit({**found, "kept": kept}, as_json=as_json, show=lambda _: print_mine(found, whose))
    if kept and not as_json:
        typer.echo(summary(kept))


@ledger_app.command("export")
def export_ledger(
    out: Annotated[Path, typer.Option("--out", help="A new directory; `audit --from` takes it.")],
    run: RunOption = None,
    bootstrap: BootstrapOption = None,
    source: FromOption = None,
    data_dir: DataDirOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Write the whole ledger, with manifest, head and checkpoints' manifests, and tables of it as CSV."""
    from node.ledger.show import export

    found = export(_where(run, bootstrap, source, data_dir, timeout_s), out, say=say)
    emit(found, as_json=as_json, show=lambda _: typer.echo(f"{found['run']['entries']} entries in {out}"))


def _where(
    run: str | None,
    bootstrap: list[str] | None,
    source: Path | None,
    data_dir: Path | None,
    timeout_s: float,
    processes: int | None = None,
    *,
    fails_as_audit: bool = False,
) -> Where:
    from node.ledger.show import Where

    set_up_logging("warning")
    if source is not None and (bootstrap or data_dir):
        raise ConfigError("--from names all that is needed", hint="leave out --bootstrap and --data-dir")
    run, peers = run_and_peers(run, bootstrap)
    try:
        directory = Path() if source is not None or (run and peers) else begin_anywhere(data_dir)
    except NodeError as error:
        if fails_as_audit:
            raise AuditError(error.message, hint=error.hint) from error
        raise
    return Where(directory, source, run, peers, timeout_s, processes)


def _own_peer(directory: Path) -> PeerId:
    from node.identity import KEY_FILE, load_identity

    return load_identity(directory / KEY_FILE, passphrase=passphrase_from(os.environ)).peer_id


def _one_format(as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other")
