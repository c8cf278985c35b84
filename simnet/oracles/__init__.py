"""What every simulation is held against, whatever its scenario expects: each oracle passes, fails, or cannot tell.

An oracle is a function of the evidence: the recording, the ledger as it lies on the trainer's disk, and the nodes'
logs. Who is honest is the scenario's word. A new oracle is a function and a line in `ORACLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from simnet.oracles.course import no_rollout_lost_or_trained_twice, staleness_within_bound, steps_advance
from simnet.oracles.judgement import Evidence, Judgement
from simnet.oracles.machine import (
    descriptors_and_tasks_return,
    event_loops_are_punctual,
    memory_stays_level,
    no_process_left_behind,
)
from simnet.oracles.trust import credits_equal_the_replay, no_bad_rollout_in_a_batch, no_honest_node_punished

__all__ = ["ORACLES", "Evidence", "Judgement", "judge_all"]

ORACLES: Final[Sequence[Callable[[Evidence], Judgement]]] = (
    steps_advance,
    staleness_within_bound,
    no_rollout_lost_or_trained_twice,
    credits_equal_the_replay,
    no_honest_node_punished,
    no_bad_rollout_in_a_batch,
    memory_stays_level,
    descriptors_and_tasks_return,
    event_loops_are_punctual,
    no_process_left_behind,
)


def judge_all(evidence: Evidence) -> list[Judgement]:
    """Every oracle's judgement, in the order of the report."""
    return [oracle(evidence) for oracle in ORACLES]
