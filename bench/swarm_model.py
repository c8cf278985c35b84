"""How a swarm grows: what one node of each role takes, and by that what a thousand or ten thousand contributors need.

Pure arithmetic over measured rates. Not a benchmark itself; `python -m bench swarm` gives it its constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from node.relay.service import MAX_POLLS
from node.swarm import HEAD_RELAYS, NEAR_RELAYS

STEP_S: Final = 1200.0
"""Of a real run: some twenty minutes (INTELLECT-2, section 4)."""
SPREAD_SHARE: Final = 0.25
"""Of a step in which a policy is to reach everybody; two steps of asynchrony hide more."""
NEWCOMERS: Final = 0.01
"""Share of contributors who join anew in a step, and take the whole policy."""
ROLLOUTS_PER_STEP: Final = 4096
"""However many contributors there are: the policy learns from no more."""
ROLLOUTS_PER_SUBMISSION: Final = 32
TOKENS_PER_ROLLOUT: Final = 6000
BYTES_PER_TOKEN: Final = 16.1
"""Of a rollout file before compression: id, log-probability, 258 / 32 of a proof."""
PATCH_FACTOR: Final = 133.0
"""How much smaller than the policy a patch is at a learning rate of 1e-6: `python -m bench patch`."""
FAN_OUT_COPIES: Final = 1.5
"""That leave the trainer, of each policy: `python -m bench fanout`."""
CARRIED: Final = 3
"""How often a relay has a submission on its link: from its author, to a validator, to the trainer."""
RELAY_BYTES_PER_S: Final = 1e9 / 8
RELAY_CORES: Final = 1
"""A relay's event loop is one thread."""
SERVING_CPU_S_PER_GB: Final = 0.56
"""Over TLS, at the server: `TLS server CPU-s/GB` of `python -m bench door`."""
PARAMETERS: Final = {"7B": 7.6e9, "32B": 32.8e9}
BYTES_PER_PARAMETER: Final = 2


@dataclass(frozen=True)
class Constants:
    """Measured rates of nodes that serve and wait, beside policies and rollout files. Bytes are of their interfaces."""

    contributor_bytes_per_s: float
    """In both directions."""
    relay_cpu_share: float
    """Of a core, for each contributor that a relay has to itself; with the policies and hand-ins of short steps."""
    hand_in_bytes: float
    """Of one submission: record, receipt, verdict, their answers, and the small file that it was measured with."""
    trainer_bytes_per_relay_s: float
    contributor_messages_per_s: float
    """HTTP requests and the DHT's messages that it sends, beside those for policies."""
    hand_in_messages: float
    """More of them for each submission."""
    relay_messages_per_s: float
    """That a relay sends itself, for each contributor that it has to itself."""


@dataclass(frozen=True)
class Need:
    """What a run takes."""

    contributors: int
    policy: str
    relays: int
    bound_by: str
    relay_mbit: float
    """Of each relay's link, over a whole step."""
    relay_cpu_share: float
    """Cores of each relay."""
    relay_messages_per_s: float
    """That reach each relay from contributors, and that it sends."""
    contributor_mb_per_step: float
    """Of the mean contributor, newcomers among them: relays' bytes are these, and hand-ins twice more."""
    contributor_messages_per_step: float
    trainer_mbit: float
    """Of the trainer's link, both directions, over a whole step."""
    trainer_share_of_relays: float
    """Of that, what depends on the number of relays."""


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (value at zero, slope)."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    square = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0
    return mean_y - slope * mean_x, slope


def spread(values: Sequence[float]) -> float:
    """By which share the largest is above the smallest."""
    return max(values) / min(values) - 1 if min(values) > 0 else math.inf


def need(constants: Constants, contributors: int, policy: str) -> Need:
    """What so many contributors with a policy of that name need."""
    size = PARAMETERS[policy] * BYTES_PER_PARAMETER
    patch, rollouts = size / PATCH_FACTOR, ROLLOUTS_PER_STEP * TOKENS_PER_ROLLOUT * BYTES_PER_TOKEN
    submissions = ROLLOUTS_PER_STEP / ROLLOUTS_PER_SUBMISSION
    hand_ins = rollouts + submissions * constants.hand_in_bytes
    waiting = contributors * constants.contributor_bytes_per_s * STEP_S
    sent = contributors * (patch + NEWCOMERS * size)
    busy_s = contributors * constants.relay_cpu_share * STEP_S + sent / 1e9 * SERVING_CPU_S_PER_GB
    bounds = {
        "three at least": NEAR_RELAYS,
        "spreading a policy": contributors * patch / (SPREAD_SHARE * STEP_S * RELAY_BYTES_PER_S),
        "its link": (sent + waiting + CARRIED * hand_ins) / (STEP_S * RELAY_BYTES_PER_S),
        "its polls": contributors * (NEAR_RELAYS + HEAD_RELAYS) / MAX_POLLS,
        "its processor": busy_s / (STEP_S * RELAY_CORES),
    }
    bound_by = max(bounds, key=bounds.__getitem__)
    relays = math.ceil(bounds[bound_by])
    of_relays = relays * constants.trainer_bytes_per_relay_s * STEP_S
    trainer = FAN_OUT_COPIES * patch + hand_ins + of_relays
    said = contributors * constants.contributor_messages_per_s + submissions * constants.hand_in_messages / STEP_S
    return Need(
        contributors=contributors,
        policy=policy,
        relays=relays,
        bound_by=bound_by,
        relay_mbit=(sent + waiting + CARRIED * hand_ins) / relays * 8e-6 / STEP_S,
        relay_cpu_share=busy_s / relays / STEP_S,
        relay_messages_per_s=(said + contributors * constants.relay_messages_per_s) / relays,
        contributor_messages_per_step=said * STEP_S / contributors,
        contributor_mb_per_step=(sent + waiting + hand_ins) / contributors / 1e6,
        trainer_mbit=trainer * 8e-6 / STEP_S,
        trainer_share_of_relays=of_relays / trainer,
    )
