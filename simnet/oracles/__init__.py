"""What every simulation is held against, whatever its scenario expects: each oracle passes, fails, or cannot tell.

An oracle is a function of the evidence: the recording, the ledger as it lies on the trainer's disk, and the nodes'
logs. Who is honest is the scenario's word. A new oracle is a function and a line in `ORACLES`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from simnet.oracles.answers import nodes_keep_answering
from simnet.oracles.course import staleness_within_bound, steps_advance
from simnet.oracles.growth import descriptors_and_tasks_return, memory_stays_level
from simnet.oracles.judgement import Evidence, Judgement
from simnet.oracles.losses import no_rollout_lost_or_trained_twice
from simnet.oracles.machine import event_loops_are_punctual, no_process_left_behind
from simnet.oracles.trust import credits_equal_the_replay, no_bad_rollout_in_a_batch, no_honest_node_punished

__all__ = ["ORACLES", "Evidence", "Judgement", "judge_all"]

log = logging.getLogger(__name__)

MAX_FINDING_CHARS: Final = 500


class Oracle(Protocol):
    """What judges one thing by the evidence."""

    __name__: str

    def __call__(self, evidence: Evidence, /) -> Judgement: ...


ORACLES: Final[Sequence[Oracle]] = (
    steps_advance,
    staleness_within_bound,
    no_rollout_lost_or_trained_twice,
    credits_equal_the_replay,
    no_honest_node_punished,
    no_bad_rollout_in_a_batch,
    memory_stays_level,
    descriptors_and_tasks_return,
    event_loops_are_punctual,
    nodes_keep_answering,
    no_process_left_behind,
)


def judge_all(evidence: Evidence) -> list[Judgement]:
    """Every oracle's judgement, in the order of the report."""
    return [_judged(oracle, evidence) for oracle in ORACLES]


def _judged(oracle: Oracle, evidence: Evidence) -> Judgement:
    """One that breaks takes no other and no report with it; that is a failure, since it could hide one."""
    try:
        return oracle(evidence)
    except Exception as error:
        log.exception("an oracle broke name=%s", oracle.__name__)
        finding = f"This oracle broke: {type(error).__name__}: {error}"
        return Judgement(oracle.__name__.replace("_", " "), "failed", finding[:MAX_FINDING_CHARS])
