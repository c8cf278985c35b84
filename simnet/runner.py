"""Runs a scenario from its first process to its report.

One thread does everything, round by round: read every node's status, strike the faults that are due, show where the
run stands, decide whether it is over. However it is over, every process has ended before the report is written.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from node.run_create import model_directory
from protocol.errors import ConfigError, DataDirError, NodeError
from simnet.commands import CliCommands, Commands
from simnet.faults import FaultPlan
from simnet.fleet import Fleet
from simnet.gather import FaultMark, NodeRecord, Outcome, Recording, now_ms
from simnet.gatherer import Gatherer
from simnet.interrupts import interruptible
from simnet.leftovers import sweep
from simnet.live import View, make_view
from simnet.memory import available_memory_mb, check_memory, fitted, needed_memory_mb
from simnet.network import check_network
from simnet.recipe_file import write_recipe
from simnet.report import write_report
from simnet.scenario import Scenario, load_scenario
from simnet.scenario_checks import check_possible
from simnet.summary import Report
from simnet.timeline import describe, plan_faults
from simnet.weights import drop_weights
from trainer.recipe import Recipe, load_recipe

log = logging.getLogger(__name__)

ROUND_S = 0.5
START_TIMEOUT_S = 120.0
FINISH_GRACE_S = 20.0
STUCK_AFTER_S = 60.0
"""What is on its way when the last node of a role has died may still make a step."""
EXIT_INTERRUPTED = 130


def run_scenario(
    name_or_path: str | Path,
    out_dir: str | Path,
    *,
    seed: int = 0,
    short: bool = False,
    live: bool = True,
    overrides: Mapping[str, Any] | None = None,
    commands: Commands | None = None,
) -> int:
    """Run a scenario and leave its report in `out_dir`: 0 when it came to its end and every expectation is met.

    Otherwise 1, or 130 after Ctrl-C (or SIGTERM). `short` takes its short form; `overrides` replaces values of the
    scenario, table by table; `commands` builds the nodes' command lines. The path of report.json is the last line of
    stdout. Raises ConfigError or another NodeError when the simulation cannot start.
    """
    console = Console()
    try:
        with interruptible():
            _sweep(console)
            scenario = _load(name_or_path, overrides, short=short)
            out = _make_out_dir(Path(out_dir), hooked=any(plan.meddled for plan in scenario.nodes()))
            recording = _simulate(scenario, out, seed=seed, commands=commands, view=make_view(console, live=live))
            report, path = write_report(recording, out)
    except KeyboardInterrupt:
        _say(console, f"interrupted before there was a report; what there was by then lies in {out_dir}")
        return EXIT_INTERRUPTED
    _say_what_held(console, report, path, problem=recording.problem)
    if report.outcome == "interrupted":
        return EXIT_INTERRUPTED
    return 0 if report.passed else 1


def _sweep(console: Console) -> None:
    """Before it is asked how much memory is free: what was left behind may hold some."""
    if killed := sweep():
        _say(console, f"killed {killed} processes that an earlier simulation left behind, which was killed itself")


def _simulate(scenario: Scenario, out: Path, *, seed: int, commands: Commands | None, view: View) -> Recording:
    """From the recipe to the last process's end."""
    recipe = _recipe_of(scenario, out, seed=seed)
    model_directory(recipe.model.source)  # made or downloaded while nobody waits for it
    with Fleet(scenario, out, commands=commands or CliCommands(), seed=seed) as fleet:
        recording = Simulation(scenario, fleet, recipe=out / "recipe.toml", seed=seed).run(view)
    if not scenario.run.keep_weights:
        drop_weights(member.data_dir for member in fleet.members.values())
    return recording


def _recipe_of(scenario: Scenario, directory: Path, *, seed: int) -> Recipe:
    """Write the run's recipe into a directory. Raises ConfigError when the scenario and it cannot both be had."""
    write_recipe(scenario.run, directory / "recipe.toml", seed=seed)
    recipe = load_recipe(directory / "recipe.toml")
    check_possible(scenario, recipe, seed=seed)
    return recipe


def _say_what_held(console: Console, report: Report, path: Path, *, problem: str) -> None:
    if report.outcome == "interrupted":
        _say(console, "interrupted: the expectations are judged by what there was until then")
    for expectation in report.expectations:
        mark = "met" if expectation.met else "NOT MET"
        _say(console, f"{mark:8} {expectation.name} {expectation.goal} (found {expectation.value})")
    for judgement in report.oracles:
        _say(console, f"{judgement.outcome:14} {judgement.name}: {judgement.finding}")
    for line in _evaluations(report):
        _say(console, line)
    if problem:
        _say(console, problem)
    _say(console, f"report for people: {path.with_suffix('.html')}")
    _say(console, str(path))


def _evaluations(report: Report) -> list[str]:
    """What the first and the last policy do with held-out prompts."""
    scores = [(one.step, score) for one in report.evaluations for score in one.pass_at if score.k == 1]
    return [
        f"pass@1 {score.value:.3f} on held-out prompts after {step} steps (95 %: {score.low:.3f} to {score.high:.3f})"
        for step, score in [*scores[:1], *scores[1:][-1:]]
    ]


def plan_scenario(name_or_path: str | Path, *, seed: int = 0, short: bool = False) -> list[str]:
    """What a scenario would do here, a line each: its nodes, its faults in the order of each node, its memory."""
    with interruptible():  # what is tried of networks is taken away again
        return _told(_load(name_or_path, None, short=short), seed=seed)


def _told(scenario: Scenario, *, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        _recipe_of(scenario, Path(directory), seed=seed)
    nodes = [
        f"{plan.name}: {plan.cheat or plan.attack or plan.role}{' (joins later)' if plan.absent else ''}"
        for plan in scenario.nodes()
    ]
    faults = list(describe(plan_faults(scenario, seed)))
    memory = f"about {needed_memory_mb(scenario)} MB of memory, of which {available_memory_mb()} MB are free"
    notes = [f"note: {note}" for note in check_network(scenario)]
    return [scenario.title or scenario.name, *nodes, *(faults or ["no faults"]), *notes, memory]


def _load(name_or_path: str | Path, overrides: Mapping[str, Any] | None, *, short: bool) -> Scenario:
    free_mb = available_memory_mb()
    scenario = fitted(load_scenario(name_or_path, overrides, short=short), free_mb)
    check_memory(scenario, free_mb)
    check_network(scenario)
    return scenario


class Simulation:
    """One run of a scenario by a fleet."""

    def __init__(self, scenario: Scenario, fleet: Fleet, *, recipe: Path, seed: int) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._recipe = recipe
        self._faults = FaultPlan(plan_faults(scenario, seed))
        records = [NodeRecord(plan.name, plan.role, "", plan.cheat) for plan in scenario.nodes()]
        self._recording = Recording(scenario, run="", seed=seed, started_ms=now_ms(), nodes=records)
        self._recording.faults_planned = self._faults.planned
        self._started_s = time.monotonic()
        self._moved = (0, self._started_s)
        """The newest step, and when it was first seen."""

    def run(self, view: View) -> Recording:
        """Start, watch and end the nodes; what was seen of them. A second Ctrl-C ends them at once."""
        recording = self._recording
        with view, closing(Gatherer(self._fleet, recording)) as gatherer:
            try:
                self._start(gatherer, view)
                recording.outcome = self._watch(gatherer, view)
                recording.over_ms = now_ms()
                recording.notes += self._faults.shortfalls()
                if recording.outcome == "finished":
                    self._see_off(gatherer, view)
            except KeyboardInterrupt:
                recording.outcome = "interrupted"
            except NodeError as error:
                recording.outcome, recording.problem = "failed", str(error)
            finally:
                recording.ended_ms = now_ms()
                self._fleet.close()
                more = (note for note in self._fleet.notes if note not in recording.notes)
                recording.notes += more  # of disks that could not be put away, too
            gatherer.poll()
            gatherer.read_final()
            gatherer.look_behind()
            view.show(recording)
        return recording

    def _start(self, gatherer: Gatherer, view: View) -> None:
        if self._scenario.title:
            view.say(self._scenario.title)
        view.say(f"simulation {self._scenario.name}: creating {len(self._fleet.members)} identities and the run")
        self._fleet.prepare(self._recipe)
        self._recording.notes = list(self._fleet.notes)
        for note in self._fleet.notes:
            view.say(f"note: {note}")
        self._recording.run = self._fleet.run
        for record in self._recording.nodes:
            record.peer_id = self._fleet.members[record.name].peer_id
        view.say(f"run {self._fleet.run}")
        self._recording.started_ms, self._started_s = now_ms(), time.monotonic()
        self._start_bootstrap(gatherer, view)
        for member in self._fleet.members.values():
            if member.process is None and not member.plan.absent:
                self._fleet.start(member.plan.name)

    def _start_bootstrap(self, gatherer: Gatherer, view: View) -> None:
        """Start the first relay and wait for it: everyone else asks it for the way."""
        name = self._fleet.bootstrap.plan.name
        self._fleet.start(name)
        record = next(record for record in self._recording.nodes if record.name == name)
        while record.status is None:
            self._round(gatherer, view)
            if not record.running:
                raise NodeError(f"{name} ended as it started:\n{self._fleet.log_tail(name)}")
            if self._elapsed_s() > START_TIMEOUT_S:
                raise NodeError(f"{name} shows no status after {START_TIMEOUT_S:.0f} s:\n{self._fleet.log_tail(name)}")

    def _watch(self, gatherer: Gatherer, view: View) -> Outcome:
        while True:
            self._round(gatherer, view)
            self._strike()
            outcome = self._outcome(gatherer)
            if outcome is not None:
                return outcome

    def _round(self, gatherer: Gatherer, view: View) -> None:
        started_s = time.monotonic()
        gatherer.poll()
        self._fleet.reap()
        view.show(self._recording)
        time.sleep(max(0.0, started_s + ROUND_S - time.monotonic()))

    def _strike(self) -> None:
        recording, step = self._recording, self._recording.step
        for fault in self._faults.strike(self._fleet.apply, step=step, elapsed_s=self._elapsed_s()):
            mark = FaultMark(now_ms(), step, fault.node, fault.action, fault.seconds, fault.sync_ms)
            recording.faults.append(mark)
        for fault in self._faults.missed:
            words = f"{fault.node} was not there to {fault.action}"
            recording.notes += [words] if words not in recording.notes else []
        self._faults.missed.clear()
        recording.faults_struck = self._faults.struck

    def _outcome(self, gatherer: Gatherer) -> Outcome | None:
        """How the simulation has ended, if it has."""
        until = self._scenario.until
        if self._run_is_over(gatherer):
            return "finished"
        if until.step is not None and self._recording.step >= until.step:
            return "reached"
        if self._elapsed_s() > until.timeout_s:
            return "timeout" if until.finished or until.step is not None else "reached"
        self._refuse_to_wait()
        return None

    def _refuse_to_wait(self) -> None:
        """Raise NodeError when all honest nodes of a role that every step needs are gone, one of them by its own fault.

        Nothing more would come until the time is up.
        """
        if self._recording.step != self._moved[0]:
            self._moved = (self._recording.step, time.monotonic())
        if time.monotonic() - self._moved[1] < STUCK_AFTER_S:
            return
        for role in ("relay", "validator", "inference"):
            members = [member for member in self._fleet.of_role(role) if not member.plan.cheat]
            if not members or any(member.running or self._faults.will_join(member.plan.name) for member in members):
                continue
            died = next((one for one in members if one.process and one.process.returncode and not one.ended_by), None)
            if died is not None and died.process is not None:
                raise NodeError(
                    f"{died.plan.name} ended with code {died.process.returncode}, no other {role} is left, and for "
                    f"{STUCK_AFTER_S:g} s there was no further step:\n{self._fleet.log_tail(died.plan.name)}",
                    hint=f"read {died.log_path}",
                )

    def _run_is_over(self, gatherer: Gatherer) -> bool:
        """Whether the trainer has come to its end with every step trained. Raises NodeError when it is gone before."""
        trainer = self._fleet.of_role("trainer")[0]
        record = next(record for record in self._recording.nodes if record.role == "trainer")
        if trainer.process is None or trainer.running or self._faults.will_join(trainer.plan.name):
            said = record.status.state if record.status else ""
            return said == "finished" and trained_all(self._recording)
        gatherer.read_final()  # what it did since it was last asked
        code, details = trainer.process.returncode, self._recording.trainer
        if code == 0 and not trainer.ended_by and trained_all(self._recording):
            return True
        raise NodeError(
            f"{trainer.plan.name} ended with code {code} after {details.steps_trained or 0} of "
            f"{details.total_steps or 'all'} steps, and without it there is no run:\n"
            f"{self._fleet.log_tail(trainer.plan.name)}",
            hint=f"read {trainer.log_path}",
        )

    def _see_off(self, gatherer: Gatherer, view: View) -> None:
        """Let the nodes of a finished run end by themselves."""
        deadline_s = time.monotonic() + FINISH_GRACE_S
        while time.monotonic() < deadline_s and any(member.running for member in self._fleet.members.values()):
            self._round(gatherer, view)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


def trained_all(recording: Recording) -> bool:
    """Whether the trainer has trained as many steps as its run has, by its own account."""
    details = recording.trainer
    return details.total_steps is not None and (details.steps_trained or 0) >= details.total_steps


def _make_out_dir(out: Path, *, hooked: bool) -> Path:
    """`hooked`: whether some nodes are meddled with by what lies in it, on their PYTHONPATH (simnet.meddle)."""
    if hooked and os.pathsep in str(out.resolve()):
        raise ConfigError(
            f"{out} has {os.pathsep!r} in its path, at which PYTHONPATH is split: no clock could be moved there and "
            "no disk slowed",
            hint="give another directory with --out",
        )
    if (out / "nodes").exists() or (out / "report.json").exists():
        raise ConfigError(
            f"{out} holds an earlier simulation", hint=f"remove it (rm -r {out}), or give another directory with --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataDirError(f"{out} cannot be created: {error.strerror}") from error
    return out.resolve()


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
