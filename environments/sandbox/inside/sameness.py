"""Giving every program the same answers, on every machine, about what honest programs ask for and what differs.

Chance, the machine's name and the number of its processors. This is for honest programs: one that wants something that
differs still finds the time, its memory's addresses and more, so nobody is blamed for what such a program does.
"""

from __future__ import annotations

import os
import posix
import random
from collections.abc import Callable
from typing import Any, Final

PROCESSORS: Final = 1
_SEED: Final = 0


def fix() -> None:
    """Before the first job of a box; jobs are forked from what this leaves, so that all begin alike."""
    chance = random.Random(_SEED)
    _replace("urandom", lambda size: chance.randbytes(size))
    vars(random)["_urandom"] = os.urandom  # what SystemRandom draws from, and `secrets` with it
    machine = os.uname().machine
    system = posix.uname_result(("Linux", "box", "0", "0", machine))
    _replace("uname", lambda: system)
    _replace("cpu_count", lambda: PROCESSORS)
    affinity = os.sched_getaffinity
    _replace("sched_getaffinity", lambda pid: affinity(pid) if pid else set(range(PROCESSORS)))
    _seed_what_has_no_seed()


def _replace(name: str, function: Callable[..., Any]) -> None:
    function.__name__ = function.__qualname__ = name
    for module in (os, posix):
        setattr(module, name, function)


def _seed_what_has_no_seed() -> None:
    """`random.Random()`, `random.seed()`: both would ask the kernel, or the clock."""
    seed = random.Random.seed

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, _SEED if a is None else a, version)

    random.Random.seed = seeded  # type: ignore[method-assign]
    random.seed = random._inst.seed
