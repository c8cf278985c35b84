"""Goals of a scenario that no run of its recipe can meet, whatever happens: refused before anything starts.

What may be met is left alone: by when a run gets somewhere in seconds, nobody knows beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from environments.registry import BUILT_IN
from node.preflight import LEAST_DISK_BYTES
from protocol.errors import ConfigError
from simnet.scenario import Fault, Scenario
from simnet.timeline import EFFECTS, plan_faults
from trainer.recipe import Recipe

MOST_REWARD: Final[Mapping[str, float]] = {name: 1.0 for name in BUILT_IN if name != "verifiers"}
"""Of environments that come with the program; a taskset of verifiers weighs its rewards as it likes."""
LEAST_DISK_MB: Final = (LEAST_DISK_BYTES >> 20) + 8
"""A node refuses to start with less room, beside what is written before it starts."""
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


def check_goals(scenario: Scenario, recipe: Recipe) -> None:
    """Refuse goals out of reach: of rewards, of accepted work, and of steps without the nodes that these need."""
    _check_rewards(scenario, recipe)
    _check_accepted(scenario, recipe)
    _check_nodes_that_stay(scenario, recipe)


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


def _check_nodes_that_stay(scenario: Scenario, recipe: Recipe) -> None:
    """Without the last node of a role there is no further step, but for what is on its way to the trainer."""
    wanted = _last_step_wanted(scenario, recipe)
    on_its_way = recipe.batch.max_staleness + 1
    gone = _gone_for_good(plan_faults(scenario, seed=0))
    for role in ("trainer", "relay", "validator", "inference"):
        names = [plan.name for plan in scenario.nodes() if plan.role == role and not plan.cheat]
        if not names or any(name not in gone for name in names):
            continue
        last = max(names, key=gone.__getitem__)
        if wanted > gone[last] + (0 if role == "trainer" else on_its_way):
            whom = last if len(names) == 1 else f"all {len(names)} honest nodes with the role {role}"
            raise ConfigError(
                f"scenario {scenario.name!r}: step {wanted} is to be reached, but from step {gone[last]} on there is "
                f"no {role} any more: {whom} will be gone for good",
                hint="give the fault a for_s, add one that undoes it, or expect fewer steps",
            )


def _last_step_wanted(scenario: Scenario, recipe: Recipe) -> int:
    until = scenario.until
    to_end = until.step if until.step is not None else recipe.batch.total_steps if until.finished else 0
    return max(scenario.expect.steps_at_least or 0, to_end)


def _gone_for_good(faults: tuple[Fault, ...]) -> dict[str, int]:
    """Nodes that something takes out of the run at a step and nothing brings back, and that step."""
    ill: dict[tuple[str, str], int | None] = {}
    for fault in faults:
        effect = EFFECTS[fault.action]
        if effect.on not in ("process", "network", "space") or fault.for_s is not None:
            continue
        ill.pop((fault.node, effect.on), None)
        if effect.after not in _IN_WORK:
            ill[fault.node, effect.on] = fault.at_step
    known = [(node, step) for (node, _), step in ill.items() if step is not None]
    return {node: min(step for other, step in known if other == node) for node, _ in known}
