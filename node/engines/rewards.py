"""The rewards of a submission's answers, as the contributor records them and every validator finds them again.

Where the environment cannot tell, the reward is NaN: such an answer is dropped and counted, never scored, and held
against nobody. Where an answer is a program, it may give this today and that tomorrow; such rewards are found again
before they are claimed, or held against somebody. Leaves out what follows from a difference (node.validator.checks).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final, Protocol

from environments.allowance import Allowance
from environments.base import Environment, Reward, Task
from node.engines.assignment import Work
from node.engines.tokenizer import Tokenizer
from node.engines.turns import Played
from protocol.errors import NodeError
from protocol.rollouts import Rollout

_log = logging.getLogger(__name__)

REWARD_TOLERANCE: Final = 1e-6
SUBMISSION_CPU_S: Final = 300.0
SUBMISSION_WALL_S: Final = 240.0
"""What judging a submission's answers may cost, found again included; the rest of them is "could not tell"."""


class Answer(Protocol):
    """What a generation and a rollout have in common."""

    @property
    def output_ids(self) -> list[int]: ...

    @property
    def finish_reason(self) -> str: ...


def submission_allowance() -> Allowance:
    """For all answers of one submission, from now on."""
    return Allowance(cpu_s=SUBMISSION_CPU_S, wall_s=SUBMISSION_WALL_S)


def claimed_rewards(work: Work, tokenizer: Tokenizer, answers: Sequence[tuple[int, Answer]]) -> list[float]:
    """The rewards that a contributor records: as `answer_rewards`, but none that a second look does not find again.

    The second look is at what earns something, in an environment whose rewards may not repeat themselves.
    """
    allowance = submission_allowance()
    found = answer_rewards(work, tokenizer, answers, allowance=allowance)
    if work.environment.repeatable:
        return found
    earning = [
        place
        for place, (index, answer) in enumerate(answers)
        if found[place] > REWARD_TOLERANCE - work.length_penalty(index, len(answer.output_ids))
    ]
    again = answer_rewards(work, tokenizer, [answers[place] for place in earning], allowance=allowance)
    for place, value in zip(earning, again, strict=True):
        if not same_reward(value, found[place]):
            found[place] = math.nan
    return found


def same_reward(value: float, other: float) -> bool:
    """Never for one that is NaN."""
    return abs(value - other) <= REWARD_TOLERANCE


def answer_rewards(
    work: Work,
    tokenizer: Tokenizer,
    answers: Sequence[tuple[int, Answer]],
    *,
    allowance: Allowance | None = None,
) -> list[float]:
    """The reward of each (prompt index, answer): the task's, less what the length costs; NaN where nobody can tell.

    One submission's answers; an allowance that was begun with others of them may be gone on with.
    """
    pairs = [(work.assignments[index].task, answer_text(tokenizer, answer)) for index, answer in answers]
    work.environment.allow(allowance or submission_allowance())
    try:
        judged = judge(work.environment, pairs)
    finally:
        work.environment.allow(None)
    penalties = [work.length_penalty(index, len(answer.output_ids)) for index, answer in answers]
    return [
        math.nan if reward.value is None else reward.value - penalty
        for reward, penalty in zip(judged, penalties, strict=True)
    ]


def answer_text(tokenizer: Tokenizer, answer: Answer) -> str:
    """What the policy wrote in its last turn, without the token that ended it."""
    turns = answer.turns if isinstance(answer, (Rollout, Played)) else []
    output_ids = answer.output_ids[turns[-2] :] if turns else answer.output_ids
    return tokenizer.decode(output_ids, stop_ids=output_ids[-1:] if answer.finish_reason == "stop" else ())


def judge(environment: Environment, pairs: Sequence[tuple[Task, str]]) -> list[Reward]:
    """Rewards in order. An environment that raises, which none may, cannot tell: one bad answer costs itself alone.

    What an environment cannot judge at all here, it says by an error of this program's own, which is let through.
    """
    try:
        rewards = environment.rewards(pairs)
    except (MemoryError, NodeError):
        raise
    except Exception:  # an environment is another's code
        if len(pairs) == 1:
            _log.exception("environment failed name=%s", environment.name)
            return [Reward(None, "the environment failed")]
        return [judge(environment, [pair])[0] for pair in pairs]
    return [reward if _is_sound(reward) else Reward(None, "the environment gave no number") for reward in rewards]


def _is_sound(reward: Reward) -> bool:
    return reward.value is None or math.isfinite(reward.value)
