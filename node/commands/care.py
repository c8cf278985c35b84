"""The commands that look after a node: doctor, leave, calibrate, bench, validate, version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from node.commands.common import (
    BootstrapOption,
    DataDirOption,
    JsonOption,
    RunOption,
    begin,
    begin_anywhere,
    emit,
    one_of,
    run_and_peers,
    say,
)
from node.commands.settings import given_settings, remembered, with_settings
from node.logs import set_up_logging
from protocol.errors import ConfigError

DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Number format: float32 or bfloat16.", callback=one_of("dtype"))
]
DeviceOption = Annotated[str, typer.Option("--device", help="What to generate on: cpu or cuda.")]
EngineOption = Annotated[
    str, typer.Option("--engine", help="What generates: torch, transformers or vllm.", callback=one_of("engine"))
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0: as torch chooses.")]
RecipeOption = Annotated[str | None, typer.Option("--recipe", help="A recipe's limits instead of a run's.")]
ModelOption = Annotated[Path | None, typer.Option("--model", help="A model directory instead of the held policy.")]


def register(app: typer.Typer) -> None:
    for name, command in (
        ("doctor", examine),
        ("leave", leave_run),
        ("calibrate", calibrate_machine),
        ("bench", bench_machine),
        ("validate", validate_self),
        ("version", show_version),
    ):
        app.command(name)(command)


@with_settings
def examine(
    ctx: typer.Context,
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the network, the sandbox and the proofs.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, max=300, help="Seconds for bootstrap peers and relays.")
    ] = 20.0,
    **given: Any,
) -> None:
    """Run the checks of start-up, and some more: one line each, and what to do. Exit 1 where one fails."""
    from node.doctor import Patient, examine, print_findings

    set_up_logging("error")
    settings = given_settings(given)
    known = remembered(Path(settings["data_dir"]) if "data_dir" in settings else None)
    patient = Patient.resolve(settings, file=given["config"], remembered=known, environ=os.environ)
    findings = examine(patient, quick=quick, timeout_s=timeout_s, say=say)
    emit([msgspec.to_builtins(each) for each in findings], as_json=as_json, show=lambda _: print_findings(findings))
    raise typer.Exit(1 if any(each.state == "failed" for each in findings) else 0)


def leave_run(
    data_dir: DataDirOption = None,
    now: Annotated[bool, typer.Option("--now", help="End it at once; what is unfinished is lost.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0, max=3600, help="Seconds to wait for its end; 0: do not wait.")
    ] = 120.0,
) -> None:
    """Have a node finish or hand in what is under way, and end. The same as Ctrl-C in its terminal."""
    from node.leaving import leave

    leave(begin(data_dir), now=now, timeout_s=timeout_s, say=say)


def calibrate_machine(
    data_dir: DataDirOption = None,
    run: RunOption = None,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    engine: EngineOption = "torch",
    threads: ThreadsOption = 1,
    rollouts: Annotated[int, typer.Option("--rollouts", min=3, help="How many answers to generate and check.")] = 384,
    as_json: JsonOption = False,
) -> None:
    """Measure whether this machine's honest work would pass a run's checks, and how sure that is."""
    from rich.console import Console

    from node.calibrate import Plan, calibrate, show

    plan = Plan(
        data_dir=begin_anywhere(data_dir), run=run_and_peers(run, None)[0], model=model, recipe=recipe, dtype=dtype,
        device=device,
        engine=engine, threads=threads, rollouts=rollouts,
    )  # fmt: skip
    found = calibrate(plan, say)
    emit(msgspec.to_builtins(found), as_json=as_json, show=lambda _: show(found, Console()))
    raise typer.Exit(1 if found.outcome == "would be rejected" else 0)


def bench_machine(
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    engine: EngineOption = "torch",
    threads: ThreadsOption = 1,
    rollouts: Annotated[int, typer.Option("--rollouts", min=3, help="How many answers to generate.")] = 96,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast this machine generates, checks, hashes and writes; the result is kept in bench.json."""
    from node.calibrate import Plan
    from node.machine_bench import measure_machine, print_speeds

    plan = Plan(
        data_dir=begin_anywhere(data_dir), model=model, recipe=recipe, dtype=dtype, device=device, engine=engine,
        threads=threads, rollouts=rollouts,
    )  # fmt: skip
    emit(measure_machine(plan, say), as_json=as_json, show=print_speeds)


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

    found = check_file(begin(data_dir), file, submission)
    emit(msgspec.to_builtins(found), as_json=as_json, show=lambda _: show(found, Console()))
    raise typer.Exit(0 if found.outcome == "accept" else 1)


def show_version(
    check: Annotated[
        bool, typer.Option("--check", help="Compare with what relays report. Exit 1: a newer release, 3: protocol.")
    ] = False,
    data_dir: DataDirOption = None,
    bootstrap: BootstrapOption = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, max=300, help="Seconds to ask relays for.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Print the version; with --check, ask the relays of this node's run which releases they have."""
    from node.version import PROTOCOL, SOFTWARE

    if not check:
        if bootstrap:
            raise ConfigError("--bootstrap is for --check", hint="intellect-node version --check --bootstrap …")
        emit({"software": SOFTWARE, "protocol": PROTOCOL}, as_json=as_json, show=lambda _: typer.echo(SOFTWARE))
        return
    from node.version_check import check_version, print_check

    found = check_version(begin_anywhere(data_dir), bootstrap=bootstrap or [], timeout_s=timeout_s)
    emit(msgspec.to_builtins(found), as_json=as_json, show=lambda _: print_check(found))
    raise typer.Exit(found.exit_code)
