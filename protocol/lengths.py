"""Length rewards: how long an answer should be, and what it costs to miss that (INTELLECT-2, section 3.1.2).

    target  = SeedStream(H("length", prompt seed)).choice(targets)
    reward  = task reward - alpha · |output tokens - target|

Output tokens are those of the rollout, the end token among them. Leaves out how a prompt says what its target is
(Environment.with_length_target).
"""

from __future__ import annotations

from protocol.records import LengthSpec
from protocol.seeds import SeedStream, length_seed


def length_target(spec: LengthSpec, prompt: bytes) -> int:
    """The length in tokens that is asked for with the prompt of a seed (protocol.seeds.prompt_seed)."""
    return SeedStream(length_seed(prompt)).choice(spec.targets)


def length_penalty(spec: LengthSpec, *, target: int, tokens: int) -> float:
    """What an answer of so many output tokens loses of its task's reward; never below 0."""
    return spec.alpha * abs(tokens - target)
