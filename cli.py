"""The command line. Thin: it reads flags, calls one function and prints; what it calls is imported when it is called.

`--help`, `--version`, `id` and `status` never import torch, libp2p, trio or aiohttp. Exit codes: 0 done, 1 failed,
2 usage, 10 a newer protocol is needed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from node.config import NodeConfig, default_data_dir, default_text, describe, passphrase_from, resolve
from node.logs import printable, set_up_logging
from node.version import SOFTWARE
from protocol.errors import ConfigError, NodeError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a language model by reinforcement learning across computers that do not trust each other.\n\n"
    "Without a command, start a node: intellect-node --role inference --run ADDRESS --bootstrap MULTIADDR",
)
run_app = typer.Typer(no_args_is_help=True, help="Create a run, or show the one in a data directory.")
simnet_app = typer.Typer(no_args_is_help=True, help="Run many nodes on this machine.")
dht_app = typer.Typer(no_args_is_help=True, help="Look into the DHT that runs are found through.")
verdict_app = typer.Typer(no_args_is_help=True, help="Look into what validators said.")
app.add_typer(run_app, name="run")
app.add_typer(verdict_app, name="verdict")
app.add_typer(simnet_app, name="simnet")
app.add_typer(dht_app, name="dht")

DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Directory of the node's key and state.", show_default="~/.intellect-node"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Directory for logs and the report. Default: out/NAME, or out/NAME-2 …"),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]


def main() -> None:
    """Entry point: every error becomes one message and an exit code."""
    try:
        app()
    except Exception as error:
        sys.exit(_report(error))


def _setting(name: str) -> Any:
    default = default_text(name)
    shown = f"{describe(name)} Default: {default}." if default else describe(name)
    return typer.Option(f"--{name.replace('_', '-')}", help=shown, show_default=False)


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    role: Annotated[str | None, _setting("role")] = None,
    run: Annotated[str | None, _setting("run")] = None,
    bootstrap: Annotated[list[str] | None, _setting("bootstrap")] = None,
    data_dir: Annotated[str | None, _setting("data_dir")] = None,
    listen: Annotated[list[str] | None, _setting("listen")] = None,
    announce: Annotated[list[str] | None, _setting("announce")] = None,
    http_host: Annotated[str | None, _setting("http_host")] = None,
    http_port: Annotated[int | None, _setting("http_port")] = None,
    public_url: Annotated[str | None, _setting("public_url")] = None,
    status_port: Annotated[int | None, _setting("status_port")] = None,
    join_timeout_s: Annotated[float | None, _setting("join_timeout_s")] = None,
    threads: Annotated[int | None, _setting("threads")] = None,
    dtype: Annotated[str | None, _setting("dtype")] = None,
    device: Annotated[str | None, _setting("device")] = None,
    log_level: Annotated[str | None, _setting("log_level")] = None,
    stay: Annotated[bool | None, typer.Option("--stay/--no-stay", help=describe("stay"), show_default=False)] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of settings, one per line.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings that result, and start nothing.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Start a node of a run, unless a command follows."""
    if version:
        typer.echo(SOFTWARE)
        raise typer.Exit
    given = {name: value for name, value in ctx.params.items() if _was_given(value)}
    if stay is False:
        given["stay"] = False
    if ctx.invoked_subcommand is not None:
        return _refuse_settings_before_a_command(given, ctx.invoked_subcommand)
    if not given and not _environment_names_a_role():
        typer.echo(ctx.get_help())
        raise typer.Exit(2)
    settings = {name: given[name] for name in NodeConfig.__struct_fields__ if name in given}
    resolved = resolve(settings, file=config)
    if dry_run:
        typer.echo(resolved.to_toml(), nl=False)
        raise typer.Exit
    _start_node(resolved.config)


def _start_node(config: NodeConfig) -> None:
    set_up_logging(config.log_level)
    from node.app import run_node

    raise typer.Exit(run_node(config))


@app.command("id")
def show_id(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Print this node's peer id; create its key if there is none."""
    from node.identity import KEY_FILE, load_or_create_identity

    directory = _begin(data_dir)
    identity = load_or_create_identity(directory, passphrase=passphrase_from(os.environ))
    shown = {"peer_id": str(identity.peer_id), "key_file": str(directory / KEY_FILE)}
    typer.echo(json.dumps(shown) if as_json else identity.peer_id)


@app.command("status")
def show_status(
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second until Ctrl-C.")] = False,
) -> None:
    """Show what the node of a data directory does."""
    from node.status_view import fetch_status, print_status, watch_status

    directory = _begin(data_dir)
    if watch and as_json:
        raise ConfigError("--watch and --json exclude each other", hint="call `status --json` in a loop")
    if watch:
        watch_status(directory)
    elif as_json:
        typer.echo(json.dumps(fetch_status(directory)))
    else:
        print_status(fetch_status(directory))


@app.command("peers")
def show_peers(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Show whom the node of a data directory knows in the DHT, whether others reach it, and who misbehaved."""
    from node.peers_show import describe_discovery, print_discovery

    described = describe_discovery(_begin(data_dir))
    if as_json:
        typer.echo(json.dumps(described))
    else:
        print_discovery(described)


DhtRunOption = Annotated[str | None, typer.Option("--run", help="Address of the run; default: the running node's.")]
DhtBootstrapOption = Annotated[
    list[str] | None, typer.Option("--bootstrap", help="Peers to ask; default: those this directory's node knows.")
]


@dht_app.command("find")
def find_in_dht(
    run: DhtRunOption = None,
    bootstrap: DhtBootstrapOption = None,
    data_dir: DataDirOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, max=300, help="Seconds to look for.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Look for a run and its relays, as a node that joins does."""
    from node.dht_show import find_run, print_run

    found = find_run(_begin(data_dir), run=run, bootstrap=bootstrap or [], timeout_s=timeout_s)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_run(found)
    raise typer.Exit(0 if found["manifest"] and found["relays"] else 1)


@dht_app.command("get")
def get_from_dht(
    key: Annotated[str, typer.Argument(help="`run`, a relay's peer id, or a whole key /intellect/…")],
    run: DhtRunOption = None,
    bootstrap: DhtBootstrapOption = None,
    data_dir: DataDirOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, max=300, help="Seconds to look for.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Get one record from several peers and show the newest: who signed it, since when, until when."""
    from node.dht_show import get_record, print_record

    found = get_record(_begin(data_dir), key, run=run, bootstrap=bootstrap or [], timeout_s=timeout_s)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_record(found)
    raise typer.Exit(0 if found["record"] else 1)


@app.command("calibrate")
def calibrate_machine(
    data_dir: DataDirOption = None,
    run: Annotated[str | None, typer.Option("--run", help="Address of the run; default: the directory's.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="A model directory instead of the held policy.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="A recipe's limits instead of a run's.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Number format: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option("--device", help="What to generate on: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: as torch chooses.")] = 1,
    rollouts: Annotated[int, typer.Option("--rollouts", min=3, help="How many answers to generate and check.")] = 384,
    as_json: JsonOption = False,
) -> None:
    """Measure whether this machine's honest work would pass a run's checks."""
    from rich.console import Console

    from node.calibrate import Plan, calibrate, show

    directory = _begin(data_dir)
    plan = Plan(
        data_dir=directory, run=run, model=model, recipe=recipe, dtype=dtype, device=device, threads=threads,
        rollouts=rollouts,
    )  # fmt: skip
    found = calibrate(plan, lambda line: typer.echo(line, err=True))
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found)))
    else:
        show(found, Console())
    raise typer.Exit(1 if found.outcome == "would be rejected" else 0)


@app.command("validate")
def validate_self(
    file: Annotated[Path, typer.Option("--self", help="A rollout file of this node, from its outbox.")],
    data_dir: DataDirOption = None,
    submission: Annotated[
        Path | None, typer.Option("--submission", help="The submission's envelope, for a file of another node.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a validator would say of a rollout file, before anything is sent. Exit 0: it would be accepted."""
    from rich.console import Console

    from node.self_check import check_file, show

    found = check_file(_begin(data_dir), file, submission)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found)))
    else:
        show(found, Console())
    raise typer.Exit(0 if found.outcome == "accept" else 1)


@run_app.command("create")
def create_run(
    recipe: Annotated[str, typer.Option("--recipe", help="A shipped recipe's name, or a TOML file.")],
    validator: Annotated[list[str], typer.Option("--validator", help="Peer id of a validator; may be given again.")],
    data_dir: DataDirOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run.", show_default="the recipe's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a run, with this data directory's key as its operator and trainer; print its address."""
    from node.identity import load_or_create_identity
    from node.run_create import create_run as create
    from protocol.identity import PeerId

    directory = _begin(data_dir)
    validators = [PeerId.parse(text) for text in validator]
    identity = load_or_create_identity(directory, passphrase=passphrase_from(os.environ))
    issued_at_ms = time.time_ns() // 1_000_000
    made = create(recipe, directory, identity=identity, validators=validators, issued_at_ms=issued_at_ms, name=name)
    shown = {"run": str(made.address), "run_id": made.manifest.id.hex()}
    typer.echo(json.dumps(shown) if as_json else made.address)


@run_app.command("show")
def show_run(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Show the run that was created in a data directory."""
    from node.run_show import describe_run, load_run

    described = describe_run(load_run(_begin(data_dir)))
    if as_json:
        typer.echo(json.dumps(described))
        return
    for key, value in described.items():
        typer.echo(f"{key} = {value if isinstance(value, str) else json.dumps(value)}")


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

    found = find_verdicts(submission, _begin(data_dir))
    if as_json:
        typer.echo(json.dumps([describe_verdict(one) for one in found]))
        return
    for one in found:
        print_verdict(one)


@simnet_app.command("run")
def run_simulation(
    scenario: Annotated[str, typer.Argument(help="A shipped scenario's name, or a TOML file.")],
    out: OutOption = None,
    seed: SeedOption = 0,
) -> None:
    """Run a scenario: nodes, faults and cheats on this machine, and a report."""
    set_up_logging("warning")
    from simnet import run_scenario

    raise typer.Exit(run_scenario(scenario, out or _free_out_dir(Path(scenario).stem), seed=seed))


@app.command("demo")
def demo(out: OutOption = None, seed: SeedOption = 0) -> None:
    """Run a whole small swarm on this machine: a trainer, relays, contributors, a validator and a cheat."""
    run_simulation("demo", out=out, seed=seed)


def _free_out_dir(name: str) -> Path:
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (Path("out") / each for each in names) if not path.exists())


def _begin(data_dir: Path | None) -> Path:
    set_up_logging("warning")
    return data_dir.expanduser().absolute() if data_dir else default_data_dir(os.environ)


def _was_given(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != ()


def _environment_names_a_role() -> bool:
    return bool(os.environ.get("INTELLECT_ROLE"))


def _refuse_settings_before_a_command(given: dict[str, Any], command: str) -> None:
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(
            f"{flag} before `{command}` has no effect: it belongs to starting a node",
            hint=f"write flags after the command; see `intellect-node {command} --help`",
        )


def _report(error: Exception) -> int:
    """Tell a person what went wrong, on stderr. Returns the exit code."""
    cause = _node_error_in(error)
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if cause is None:
        message = f"unexpected {type(error).__name__}: {error}"
        hint = "run it again with --log-level debug and report what it prints"
    else:
        message, hint = cause.message, cause.hint
    typer.echo(f"error: {printable(message)}", err=True)
    if hint:
        typer.echo(f"  next: {printable(hint)}", err=True)
    return 1 if cause is None else cause.exit_code


def _node_error_in(error: BaseException) -> NodeError | None:
    """The error itself, or the first one in a nursery's group."""
    if isinstance(error, NodeError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for part in error.exceptions if (found := _node_error_in(part))), None)
    return None


if __name__ == "__main__":
    main()
