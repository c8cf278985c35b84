"""Policy objectives by name: what a token's loss is, given how much likelier the token has become and its advantage.

two_sided   INTELLECT-2, section 3.4: GRPO's clipping with a bound δ on the ratio where the advantage is negative
one_sided   GRPO and PPO: the same without δ (arXiv 2402.03300, section 4.1); unbounded where the advantage is negative
masked      tokens whose probability moved too far, the way their advantage asks, are left out; no other is clipped
sequence    GSPO: one ratio an answer, the geometric mean over its tokens (arXiv 2507.18071, section 4.1)

All act on N tokens laid end to end. KL and entropy terms, weights and sums are trainer.grpo's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from trainer.recipe import LossSettings

_LOG_RATIO_LIMIT: Final = 20.0
"""Where exp() is cut: far beyond every clip bound, and short of the infinities that turn gradients into NaN."""


class Tokens(NamedTuple):
    """What an objective sees of N answer tokens: [N] each."""

    logprobs: Tensor
    """Of the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    """Where the ratio is 1."""
    advantages: Tensor
    owner: Tensor
    """To which answer each token belongs: 0, 1, 2 …"""


class Outcome(NamedTuple):
    """An objective's verdict on N tokens: [N] each."""

    loss: Tensor
    clipped: Tensor
    """Whether the token's gradient was cut off."""
    ratio: Tensor


Objective = Callable[[Tokens, LossSettings], Outcome]


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """How much likelier tokens have become; finite and so is its gradient."""
    return (logprobs - old).clamp(max=_LOG_RATIO_LIMIT).exp()


def two_sided(tokens: Tokens, settings: LossSettings) -> Outcome:
    """−min(min(ρ, δ)·A, clip(ρ, 1 − ε, 1 + ε)·A): what δ adds is a bound where A < 0 and ρ is large."""
    ratio = ratio_of(tokens.logprobs, tokens.old_logprobs)
    return _clipped(ratio, ratio.clamp(max=settings.delta), tokens.advantages, settings)


def one_sided(tokens: Tokens, settings: LossSettings) -> Outcome:
    """−min(ρ·A, clip(ρ, 1 − ε, 1 + ε)·A): grows with ρ without bound where A < 0."""
    ratio = ratio_of(tokens.logprobs, tokens.old_logprobs)
    return _clipped(ratio, ratio, tokens.advantages, settings)


def masked(tokens: Tokens, settings: LossSettings) -> Outcome:
    """−keep·ρ·A + c·(log ρ)²; keep is 0 where the probability moved beyond `mask_difference` in the sense of A."""
    ratio = ratio_of(tokens.logprobs, tokens.old_logprobs)
    with torch.no_grad():
        moved = tokens.logprobs.exp() - tokens.old_logprobs.exp()
        left_out = moved * tokens.advantages.sign() > settings.mask_difference
    drift = (tokens.logprobs - tokens.old_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    gain = torch.where(left_out, 0.0, ratio * tokens.advantages)
    return Outcome(settings.mask_drift_coefficient * drift.square() - gain, left_out, ratio)


def sequence(tokens: Tokens, settings: LossSettings) -> Outcome:
    """GRPO's clipping of an answer's ratio s = exp(mean of its log-ratios), the same for each of its tokens."""
    counts = torch.bincount(tokens.owner)
    sums = torch.zeros(len(counts), dtype=tokens.logprobs.dtype, device=tokens.logprobs.device)
    sums = sums.index_add(0, tokens.owner, tokens.logprobs - tokens.old_logprobs)
    ratio = (sums / counts.clamp(min=1)).clamp(max=_LOG_RATIO_LIMIT).exp().index_select(0, tokens.owner)
    return _clipped(ratio, ratio, tokens.advantages, settings)


def _clipped(ratio: Tensor, bounded: Tensor, advantages: Tensor, settings: LossSettings) -> Outcome:
    gain, clipped_gain = bounded * advantages, ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon) * advantages
    with torch.no_grad():
        cut = (clipped_gain < gain) | (bounded < ratio) & (advantages < 0)
    return Outcome(-torch.minimum(gain, clipped_gain), cut, ratio)


OBJECTIVES: Final[dict[str, Objective]] = {
    "two_sided": two_sided,
    "one_sided": one_sided,
    "masked": masked,
    "sequence": sequence,
}
