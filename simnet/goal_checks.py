"""Goals of a scenario that no run of its recipe can meet, whatever happens: refused before anything starts.

What may be met is left alone: by when a run gets somewhere in seconds nobody knows beforehand, but that it gets nowhere
before its first processes have loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from environments.registry import BUILT_IN
from node.preflight import LEAST_DISK_BYTES
from protocol.errors import ConfigError
from simnet.scenario import Fault, Scenario
from simnet.timeline import EFFECTS, left_in, plan_faults
from trainer.recipe import Recipe

MOST_REWARD: Final[Mapping[str, float]] = {name: 1.0 for name in BUILT_IN if name != "verifiers"}
"""Of environments that come with the program; a taskset of verifiers weighs its rewards as it likes."""
LEAST_DISK_MB: Final = (LEAST_DISK_BYTES >> 20) + 8
"""A node refuses to start with less room, beside what is written before it starts."""
SOONEST_WORK_S: Final = 3.0
"""So soon after the first process began nothing has been handed in, judged or trained on any machine: one program after
another has to be loaded with its libraries, and then a policy published."""
_IN_WORK: Final = ("running", "whole", "normal")


def check_finite(scenario: Scenario) -> None:
    """Refuse numbers that are none, which TOML can write."""
    for place, value in _numbers(msgspec.to_builtins(scenario), ""):
        if not math.isfinite(value):
            raise ConfigError(f"scenario {scenario.name!r}: {place[1:]} = {value} is not a finite number")


def check_disks(scenario: Scenario) -> None:
    """Refuse disks that are too small for any node to start."""
    for entry, _, name in scenario.named():
        if entry.disk_mb is not None and entry.role != "hostile" and entry.disk_mb < LEAST_DISK_MB:
            raise ConfigError(
                f"{name}: disk_mb is {entry.disk_mb}, and a {entry.role} starts with {LEAST_DISK_MB} MB at least"
            )


def check_goals(scenario: Scenario, recipe: Recipe, *, seed: int) -> None:
    """Refuse goals out of reach: of rewards, of accepted work, and of steps without the nodes that these need."""
    _check_rewards(scenario, recipe)
    _check_accepted(scenario, recipe)
    _check_nodes_that_stay(scenario, recipe, seed=seed)


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{place}.{str(key)[:40]}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value, start=1):
            yield from _numbers(inner, f"{place}.{number}")
    elif isinstance(value, float):
        yield place, value


def _check_rewards(scenario: Scenario, recipe: Recipe) -> None:
    environment = recipe.environment.name
    most = MOST_REWARD.get(environment)
    goals = {"reward_at_least": scenario.expect.reward_at_least}
    if recipe.rollout.length is None:  # else what answers of a wrong length lose has no bound that is known here
        goals["reward_gain_at_least"] = scenario.expect.reward_gain_at_least
    for name, goal in goals.items():
        if goal is not None and most is not None and goal > most:
            raise ConfigError(
                f"scenario {scenario.name!r} expects {name} = {goal:g}, but rewards of {environment} lie between 0 and "
                f"{most:g}"
            )


def _check_accepted(scenario: Scenario, recipe: Recipe) -> None:
    expect, until = scenario.expect, scenario.until
    steps = recipe.batch.total_steps if until.step is None else min(recipe.batch.total_steps, until.step + 1)
    each = steps * recipe.rollout.max_submissions_per_step
    contributors = sum(plan.role == "inference" for plan in scenario.nodes())
    limits = {
        "accepted_per_honest_at_least": (expect.accepted_per_honest_at_least, each, "a contributor"),
        "accepted_at_least": (expect.accepted_at_least, each * contributors, f"{contributors} contributors"),
    }
    for name, (goal, most, whose) in limits.items():
        if goal is not None and goal > most:
            raise ConfigError(
                f"scenario {scenario.name!r} expects {name} = {goal}, but in {steps} steps of at most "
                f"{recipe.rollout.max_submissions_per_step} submissions {whose} can have {most}"
            )


def _last_step_wanted(scenario: Scenario, recipe: Recipe) -> int:
    until = scenario.until
    to_end = until.step if until.step is not None else recipe.batch.total_steps if until.finished else 0
    return max(scenario.expect.steps_at_least or 0, to_end)


def _check_anybody(scenario: Scenario, wanted: int) -> None:
    honest = any(plan.role == "inference" and plan.cheat is None for plan in scenario.nodes())
    if wanted and not honest:
        raise ConfigError(
            f"scenario {scenario.name!r}: step {wanted} is to be reached, but its fleet has no honest contributor to "
            "train on",
            hint='add [[fleet]] role = "inference", or set [until] finished = false and a timeout_s',
        )


def _check_nodes_that_stay(scenario: Scenario, recipe: Recipe, *, seed: int) -> None:
    """Without the last node of a role there is no further step, but for what is on its way to the trainer."""
    wanted = _last_step_wanted(scenario, recipe)
    _check_anybody(scenario, wanted)
    gone = gone_for_good(scenario, plan_faults(scenario, seed))
    _check_trainer(scenario, gone)
    for role, names, needed in _needed(scenario, recipe):
        step = _lost_at(names, needed, gone)
        if step is None:
            continue
        on_its_way = 0 if role == "trainer" or step == 0 else recipe.batch.max_staleness + 1
        if wanted > step + on_its_way:
            few = f"is no {role} any more" if needed == 1 else f"are fewer than {needed} {role}s"
            raise ConfigError(
                f"scenario {scenario.name!r}: step {wanted} is to be reached, but {_from(step)} there {few}: "
                f"{_named(names, gone)} will be gone for good",
                hint="give the fault a for_s, add one that undoes it, or expect fewer steps",
            )


def _check_trainer(scenario: Scenario, gone: Mapping[str, Fault]) -> None:
    """A simulation whose trainer has been ended before the run has failed, whatever it was to wait for."""
    (trainer,) = (plan.name for plan in scenario.nodes() if plan.role == "trainer")
    fault = gone.get(trainer)
    step = None if fault is None or fault.action not in ("kill", "leave") else newest_step(fault)
    if step is not None:
        raise ConfigError(
            f"scenario {scenario.name!r}: {_from(step)} there is no trainer any more: {trainer} will be gone for good, "
            "and the simulation fails without it",
            hint="give the fault a for_s, or add one that undoes it",
        )


def _needed(scenario: Scenario, recipe: Recipe) -> Iterator[tuple[str, list[str], int]]:
    """Roles without which no step is made: the nodes that have one, and how many of these it takes."""
    plans = scenario.nodes()
    for role in ("trainer", "relay", "validator", "inference"):
        honest = [plan.name for plan in plans if plan.role == role and not plan.cheat]
        if honest:
            yield role, honest, 1
    yield "validator", [plan.name for plan in plans if plan.role == "validator"], recipe.quorum


def _lost_at(names: list[str], needed: int, gone: Mapping[str, Fault]) -> int | None:
    """The newest step that may be reached while enough of these are there; nothing where nobody knows, or they stay."""
    steps = sorted(step for name in names if name in gone and (step := newest_step(gone[name])) is not None)
    too_many = len(names) - needed  # so many may go
    return steps[too_many] if len(steps) > too_many else None


def _from(step: int) -> str:
    return f"from step {step} on" if step else "before any step"


def _named(names: list[str], gone: Mapping[str, Fault]) -> str:
    lost = [name for name in names if name in gone]
    return lost[0] if len(lost) == 1 else f"{len(lost)} of {len(names)} nodes ({', '.join(lost[:3])} …)"


def newest_step(fault: Fault) -> int | None:
    """The newest step that a run may be at when a fault strikes; nothing where that depends on its pace."""
    if fault.at_step is not None:
        return fault.at_step
    return 0 if fault.at_s is not None and fault.at_s < SOONEST_WORK_S else None


def gone_for_good(scenario: Scenario, faults: Iterable[Fault]) -> dict[str, Fault]:
    """Nodes that something takes out of the run and nothing brings back, and the first fault that does so."""
    ill: dict[tuple[str, str], Fault] = {}
    for fault in faults:
        on = EFFECTS[fault.action].on
        if on not in ("process", "network", "space"):
            continue
        ill.pop((fault.node, on), None)
        if left_in(fault) not in _IN_WORK:
            ill[fault.node, on] = fault
    lasting = [(node, fault) for (node, on), fault in ill.items() if on != "network"]
    lasting += _cut_off(scenario, {node: fault for (node, on), fault in ill.items() if on == "network"})
    found: dict[str, Fault] = {}
    for node, fault in lasting:
        if node not in found or _moment(fault) < _moment(found[node]):
            found[node] = fault
    return found


def _cut_off(scenario: Scenario, parted: Mapping[str, Fault]) -> Iterator[tuple[str, Fault]]:
    """Nodes that stay on another side than the trainer does, with what parts them."""
    names = {plan.name: plan.role for plan in scenario.nodes()}
    trainer = next(name for name, role in names.items() if role == "trainer")
    sides = {name: fault.side for name, fault in parted.items()}
    for name in names:
        if sides.get(name, "") != sides.get(trainer, ""):
            yield name, min((parted[one] for one in (name, trainer) if one in parted), key=_moment)


def _moment(fault: Fault) -> float:
    """For faults of one node: the earlier, the less; those whose step nobody knows come last."""
    step = newest_step(fault)
    return math.inf if step is None else step
