"""The command line. Thin: node.commands reads flags, calls one function and prints; here the families are put together.

`--help`, `--version`, `id` and `status` never import torch, libp2p, trio or aiohttp. Exit codes: 0 done, 1 failed,
2 usage, 3 a newer protocol is needed.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

EXIT_INTERRUPTED = 130


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process: some libraries swallow a KeyboardInterrupt that falls into their import."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # ignored, as in the background of a shell, or somebody else's
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


with _ending_at_once():
    import typer

    from node.commands import care, config, data, env, identity, ledger, look, membership, policy, runs, watch
    from node.commands.common import JsonOption, emit
    from node.commands.settings import given_settings, resolved_settings, with_settings
    from node.config import NodeConfig, variable
    from node.logs import printable, set_up_logging
    from node.version import SOFTWARE
    from protocol.errors import ConfigError, NodeError, innermost

app = typer.Typer(
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a language model by reinforcement learning across computers that do not trust each other.\n\n"
    "Without a command, start a node: intellect-node --role inference --run ADDRESS@MULTIADDR",
    epilog="Limits of rates and storage are settings too: intellect-node config show --help. "
    "Exit codes: 0 done, 1 failed, 2 usage, 3 a newer protocol is needed.",
)
simnet_app = typer.Typer(no_args_is_help=True, help="Run many nodes on this machine.")
for module in (look, watch, care, policy, data, ledger, membership):
    module.register(app)
for name, family in (
    *(("run", runs.run_app), ("id", identity.id_app), ("config", config.config_app), ("env", env.env_app)),
    ("simnet", simnet_app),
):
    app.add_typer(family, name=name)

OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Directory for logs and the report. Default: out/NAME, or out/NAME-2 …"),
]
ShortOption = Annotated[bool, typer.Option("--short", help="Take the scenario's short form, which lasts minutes.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]


def main() -> None:
    """Entry point: every error becomes one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows "?" for it
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="intellect-node")
    except SystemExit as ended:
        sys.exit(_flushed(ended.code))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        sys.exit(_report(error))


def _flushed(code: str | int | None) -> str | int | None:
    """What is still to be written may not fit on a full disk, or nobody reads it any more: then that is the outcome."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _report(error)
    return code


@app.callback(invoke_without_command=True)
@with_settings
def start(
    ctx: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings that result, and start nothing.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    **given: Any,
) -> None:
    """Start a node of a run, unless a command follows."""
    if version:
        typer.echo(SOFTWARE)
        raise typer.Exit
    said = [*given_settings(given), *(["config"] if given["config"] else []), *(["dry_run"] if dry_run else [])]
    if ctx.invoked_subcommand is not None:
        return _refuse_settings_before_a_command(said, ctx.invoked_subcommand)
    if not said and variable("role") not in os.environ:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)
    resolved = resolved_settings(given)
    if dry_run:
        typer.echo(resolved.to_toml(), nl=False)
        raise typer.Exit
    _start_node(resolved.config)


def _start_node(config: NodeConfig) -> None:
    set_up_logging(config.log_level, log_format=config.log_format)
    with _ending_at_once():
        from node.start import start_node

    raise typer.Exit(start_node(config))


@simnet_app.command("run")
def run_simulation(
    scenario: Annotated[
        str, typer.Argument(help="A shipped scenario's name, or a TOML file: a scenario, or a recipe.")
    ],
    out: OutOption = None,
    seed: SeedOption = 0,
    short: ShortOption = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print nodes, faults and the memory they take, and start nothing.")
    ] = False,
) -> None:
    """Run a scenario: nodes, faults and cheats on this machine, and a report. A recipe is given a small fleet."""
    set_up_logging("warning")
    with _ending_at_once():
        from simnet.runner import plan_scenario, run_scenario

    if plan:
        typer.echo("\n".join(plan_scenario(scenario, seed=seed, short=short)))
        raise typer.Exit
    raise typer.Exit(run_scenario(scenario, out or _free_out_dir(Path(scenario).stem), seed=seed, short=short))


@simnet_app.command("list")
def list_scenarios() -> None:
    """List the scenarios that come with the program."""
    from simnet.scenario import load_scenario, scenario_names

    for name in scenario_names():
        typer.echo(f"{name:18} {load_scenario(name).title}")


@simnet_app.command("compare")
def compare_simulations(
    a: Annotated[Path, typer.Argument(help="The first simulation's report.json, or its directory.")],
    b: Annotated[Path, typer.Argument(help="The second one's.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write the page here too, such as compare.html.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Lay two simulations' reports side by side: figures and their change, oracles, hops, and who waited."""
    from simnet.compare import compare_reports, shown_as_json, write_comparison
    from simnet.compare_page import print_comparison

    comparison = compare_reports(a, b)
    if out is not None:
        write_comparison(comparison, out)
    emit(shown_as_json(comparison), as_json=as_json, show=lambda _: print_comparison(comparison))


@app.command("demo")
def demo(out: OutOption = None, seed: SeedOption = 0) -> None:
    """Run a whole small swarm on this machine: a trainer, relays, contributors, a validator and a cheat."""
    run_simulation("demo", out=out, seed=seed, short=False, plan=False)


def _free_out_dir(name: str) -> Path:
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (Path("out") / each for each in names) if not path.exists())


def _refuse_settings_before_a_command(said: list[str], command: str) -> None:
    if said:
        flag = "--" + said[0].replace("_", "-")
        raise ConfigError(
            f"{flag} before `{command}` has no effect: it belongs to starting a node",
            hint=f"write flags after the command; see `intellect-node {command} --help`",
        )


def _report(error: BaseException) -> int:
    """Tell a person what went wrong, on stderr. Returns the exit code."""
    cause = _node_error_in(error) or _of_output(error)
    if isinstance(error, OSError):
        _let_go_of_output()
    if isinstance(error, BrokenPipeError):
        return 1  # whoever read it has seen enough
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if cause is None:
        error = innermost(error)
        message = f"unexpected {type(error).__name__}: {error}"
        hint = "run it again with --log-level debug and report what it prints"
    else:
        message, hint = cause.message, cause.hint
    with suppress(OSError):  # nobody reads this either
        typer.echo(f"error: {printable(message)}", err=True)
        if hint:
            typer.echo(f"  next: {printable(hint)}", err=True)
    return 1 if cause is None else cause.exit_code


def _of_output(error: BaseException) -> NodeError | None:
    """A disk that is full where no part of the program could say what for: most often under the output itself."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = error.filename or "what the command prints"
        return NodeError(f"no space is left for {what}", hint="free some (df -h), or send the output elsewhere")
    return None


def _let_go_of_output() -> None:
    """What standard output could not take is given up, so that the interpreter does not try again at its end."""
    with suppress(OSError, ValueError):  # a stream of a test has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _node_error_in(error: BaseException) -> NodeError | None:
    """The error itself, or the first one in a nursery's group."""
    if isinstance(error, NodeError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for part in error.exceptions if (found := _node_error_in(part))), None)
    return None


if __name__ == "__main__":
    main()
