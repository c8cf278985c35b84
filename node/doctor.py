"""`intellect-node doctor`: the checks of start-up (node.preflight), and what start-up finds out only as it goes on.

The network is looked at as a node that joins does it, by a client of the same code; the proofs with the compute process
and the self-check of a contributor. Nothing is kept, and a node that runs is not disturbed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio
from rich.console import Console
from rich.text import Text

from environments.sandbox.status import sandbox_status
from node.calibrate import manifest_of_recipe
from node.clock import SET_CLOCK
from node.compute.process import ComputeProcess
from node.config import NodeConfig, resolve
from node.dht_show import joined
from node.held import held_run, newest_policy
from node.homes import about, chosen_home
from node.inference.role import LOAD_TIMEOUT_S, run_self_test
from node.logs import printable
from node.machine_check import machine_fault
from node.preflight import COMPUTES, Finding, examine_locally
from node.run_create import model_directory
from node.version_check import Reported, ask_relays
from node.words import count
from p2p.discovery import P2PNode
from protocol.constants import MAX_CLOCK_SKEW_S
from protocol.errors import DataDirError, NodeError, innermost
from protocol.identity import PeerId
from protocol.records import EnvironmentSpec, Manifest
from protocol.run import RunAddress
from trainer.recipe import load_recipe

_MARKS: Final = {"ok": "ok     ", "warning": "warning", "failed": "FAILED ", "skipped": "-      "}
_SOME_RUN: Final = f"{PeerId(bytes(32))}/none"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Patient:
    """The node that is looked at; `run` is empty where nobody has said which it is in."""

    config: NodeConfig
    run: str

    @classmethod
    def resolve(
        cls,
        settings: Mapping[str, Any],
        *,
        file: Path | None,
        remembered: Mapping[str, str],
        environ: Mapping[str, str],
    ) -> Patient:
        """From what was given, else the only data directory there is, else a contributor that never ran."""
        known: dict[str, Any] = dict(remembered)
        if "data_dir" not in settings and not {"role", "run"} & settings.keys():
            known |= _only_home(environ)
        missing = {"role": "inference", "run": _SOME_RUN}
        config = resolve(settings, file=file, environ=environ, remembered={**missing, **known}).config
        return cls(config, "" if config.run == _SOME_RUN else config.run)


def _only_home(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        home = about(chosen_home(None, environ))
    except NodeError:
        return {}
    said = {"role": home.role, "run": home.run}
    return {"data_dir": str(home.path), **{name: text for name, text in said.items() if text}}


def examine(patient: Patient, *, quick: bool, timeout_s: float, say: Say) -> list[Finding]:
    """Every finding, the cheap ones first. Never raises for what it looks at."""
    found = list(examine_locally(patient.config))
    if quick:
        return found
    say(f"looking for bootstrap peers and relays, for {timeout_s:g} s at most …")
    found += _network(patient, timeout_s)
    say("trying the sandbox …")
    found.append(_sandbox(patient))
    if patient.config.role in COMPUTES and not any(each.state == "failed" for each in found if each.name == "torch"):
        say("starting the engine and checking its proofs …")
        found += _engine(patient)
    return found


# ------------------------------------------------------------------------------------------------------------ network


def _network(patient: Patient, timeout_s: float) -> list[Finding]:
    if not patient.run:
        skipped = "no run is named, and no node has been started here"
        return [Finding(name, "skipped", skipped, "give --run and --bootstrap") for name in ("bootstrap", "relays")]
    config = patient.config

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        adverts = await node.find_relays(timeout_s=left_s)
        reported = await ask_relays(adverts, address)
        return {"state": node.bootstrap_state, "peers": node.dht_peers, "reported": reported}

    try:
        met = joined(config.data_dir, patient.run, config.bootstrap, ask, timeout_s=timeout_s)
    except NodeError as error:
        fix = error.hint or "check --bootstrap and this computer's network"
        return [
            Finding("bootstrap", "failed", error.message, fix),
            Finding("relays", "skipped", "nobody could be asked for them"),
        ]
    said = f"{count(met['peers'], 'DHT server')} answered"
    return [Finding("bootstrap", "ok", said), *_relays(met["reported"]), *_clocks(met["reported"])]


def _relays(reported: Sequence[Reported]) -> Iterator[Finding]:
    answering = [each for each in reported if each.protocol]
    if not reported:
        fix = "check --run letter by letter, and ask the operator whether a relay is up"
        yield Finding("relays", "failed", "none was found", fix)
    elif not answering:
        fix = "another network may not let HTTPS out to ports such as 8470: try another one, or ask the operator"
        yield Finding("relays", "failed", f"none of {len(reported)} answers", fix)
    elif len(answering) < len(reported):
        silent = ", ".join(each.peer_id[-8:] for each in reported if not each.protocol)
        yield Finding("relays", "warning", f"{len(answering)} of {len(reported)} answer; silent: {silent}")
    else:
        yield Finding("relays", "ok", f"{count(len(reported), 'relay')} answered")


def _clocks(reported: Sequence[Reported]) -> Iterator[Finding]:
    """The middle one of the relays' clocks: one that lies changes nothing."""
    ahead = sorted(each.clock_ahead_s for each in reported if each.clock_ahead_s is not None)
    if not ahead:
        return
    middle = ahead[len(ahead) // 2]
    if abs(middle) > MAX_CLOCK_SKEW_S:
        way = "behind" if middle > 0 else "ahead of"
        yield Finding("clock of relays", "failed", f"this one is {abs(middle):.0f} s {way} theirs", SET_CLOCK)
    else:
        yield Finding("clock of relays", "ok", f"within {max(1, round(abs(middle)))} s of theirs")


# ---------------------------------------------------------------------------------------------------- what is computed


def _sandbox(patient: Patient) -> Finding:
    """What start-up asks once it knows the run; where no run is held here, whether programs could be isolated."""
    spec = _environment(patient.config.data_dir)
    fault = machine_fault(spec) if spec is not None and patient.config.role in COMPUTES else None
    if fault is not None:
        return Finding("sandbox", "failed", fault.message, fault.hint)
    status = sandbox_status()
    if status.works:
        return Finding("sandbox", "ok", f"{status.kind} (Python {status.python}): {status.reason}")
    return Finding("sandbox", "warning", f"{status.reason}; runs of code problems need it", status.fix)


def _environment(data_dir: Path) -> EnvironmentSpec | None:
    try:
        return held_run(data_dir).record.environment
    except NodeError:
        return None


def _engine(patient: Patient) -> list[Finding]:
    """Device and proofs, with the policy that is held, or with the demo's."""
    with _subject(patient.config.data_dir) as (what, manifest, directory):
        try:
            tested = trio.run(_test_engine, patient.config, manifest, directory)
        except BaseExceptionGroup as group:
            return [_engine_fault(group, patient.config)]
        except NodeError as error:
            return [_engine_fault(error, patient.config)]
    engine = tested["engine"]
    share = f"{tested['share']:.0%} of the limit {tested['limit']}" if tested["limit"] else "no limit"
    finding = Finding(
        "proof margin", "ok", f"{tested['answers']} answers of {what} hold against itself, at most {share} used"
    )
    return [Finding("device", "ok", f"{patient.config.device}: {engine}, {patient.config.dtype}"), finding]


@contextmanager
def _subject(data_dir: Path) -> Iterator[tuple[str, Manifest, Path]]:
    try:
        run = held_run(data_dir)
        policy = newest_policy(data_dir, run.id)
        yield "the held policy", run.record, policy.path
    except DataDirError:
        recipe = load_recipe("demo")
        directory = model_directory(recipe.model.source)
        yield "the demo's policy", manifest_of_recipe(recipe, directory), directory


async def _test_engine(config: NodeConfig, manifest: Manifest, directory: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        compute = ComputeProcess(
            "node.inference.compute",
            name="engine",
            log_path=Path(scratch) / "compute.log",
            env=config.engine_settings,
            threads=config.threads,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(compute.run)
            await compute.wait_first_start()
            loaded = await compute.call(
                "load", timeout_s=LOAD_TIMEOUT_S, checkpoint_dir=str(directory), checkpoint_id=bytes(32)
            )
            found = await run_self_test(compute, manifest)
            nursery.cancel_scope.cancel()
    return {**found, "engine": loaded["engine"]}


def _engine_fault(error: BaseException, config: NodeConfig) -> Finding:
    named = _named(error)
    name = "proof margin" if type(named).__name__ == "SelfTestFailed" else "device"
    return Finding(name, "failed", f"{config.device}, {config.dtype}: {named.message}", named.hint)


def _named(error: BaseException) -> NodeError:
    first = innermost(error)
    return first if isinstance(first, NodeError) else NodeError(f"{type(first).__name__}: {first}")


def print_findings(findings: Sequence[Finding]) -> None:
    """One line each, and one for what to do."""
    console = Console()
    for each in findings:
        console.print(Text(printable(f"{_MARKS[each.state]} {each.name}: {each.what}")), soft_wrap=True)
        if each.fix:
            console.print(Text(printable(f"        next: {each.fix}")), soft_wrap=True)
