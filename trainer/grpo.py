"""Group relative policy optimisation: advantages, the two-sided clipped loss, its KL and entropy terms.

INTELLECT-2, section 3.4. Tensors are [B, W]: a row a rollout, a column a token, `mask` 1 on tokens the policy emitted.
Sums are divided by what the caller says a whole optimiser step holds, so that micro-batches never change the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import ConfigError
from trainer.recipe import LossSettings

_STD_FLOOR = 1e-6
_LOG_RATIO_LIMIT = 20.0
"""Where exp() is cut: far beyond every clip bound, and short of the infinities that turn gradients into NaN."""


def group_advantages(rewards: Tensor, *, normalise: bool = True) -> Tensor:
    """Reward minus the group's mean, [groups, group_size] → same; `normalise` divides by the standard deviation.

    A group whose rewards are all equal has advantages of exactly zero. Raises ConfigError for groups of one.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ConfigError(
            f"rewards of shape {tuple(rewards.shape)} hold no groups of two or more: nothing to compare a rollout with",
            hint="set rollout.group_size to 2 or more",
        )
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    centred = (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(equal, 0.0)
    return centred / (rewards.std(dim=1, keepdim=True) + _STD_FLOOR) if normalise else centred


@dataclass(frozen=True)
class LossInputs:
    """What the loss compares: all [B, W] but `advantages`, which is [B]."""

    logprobs: Tensor
    """Of the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    """Where the ratio is 1: of the policy that sampled, or of the one before the step."""
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    reference_logprobs: Tensor | None = None
    """Of the policy that the run began with; needed for a KL term."""
    importance: Tensor | None = None
    """Weights of tokens, for rollouts of a staler policy than `old_logprobs`."""


def token_objective(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The loss of each token, [B, W], before masking.

    −min(min(ρ, δ)·A, clip(ρ, 1 − ε, 1 + ε)·A): what δ adds is a bound where A < 0 and ρ is large.
    """
    ratio = _ratio(inputs.logprobs, inputs.old_logprobs)
    advantages = inputs.advantages[:, None]
    bounded = ratio.clamp(max=settings.delta) * advantages
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon) * advantages
    loss = -torch.minimum(bounded, clipped)
    if inputs.importance is not None:
        loss = loss * inputs.importance
    if settings.kl_coefficient and inputs.reference_logprobs is not None:
        loss = loss + settings.kl_coefficient * kl_estimate(inputs.logprobs, inputs.reference_logprobs)
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * inputs.entropy
    return loss


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), never negative, with its gradient in `logprobs`."""
    difference = (reference - logprobs).clamp(max=_LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1


def importance_weights(old_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float) -> Tensor:
    """How much likelier each token was before the step than when it was sampled, at most `cap`."""
    return _ratio(old_logprobs, behaviour_logprobs).clamp(max=cap)


def grpo_loss(inputs: LossInputs, settings: LossSettings, *, normaliser: float) -> Tensor:
    """A micro-batch's share of an optimiser step's loss.

    `normaliser` is what the whole optimiser step holds: its tokens (level `token`) or its rollouts (level `sample`).
    """
    losses = token_objective(inputs, settings) * inputs.mask
    if settings.level == "sample":
        losses = losses.sum(dim=1) / inputs.mask.sum(dim=1).clamp(min=1)
    return losses.sum() / normaliser


def _ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    return (logprobs - old).clamp(max=_LOG_RATIO_LIMIT).exp()


@dataclass
class LossSums:
    """Sums over tokens, from which true means are taken whatever the micro-batches were."""

    tokens: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    kl: float | None = None
    drift: float = 0.0
    ratio_max: float = 0.0

    @torch.no_grad()
    def add(self, inputs: LossInputs, settings: LossSettings) -> None:
        """Count a micro-batch."""
        mask, advantages = inputs.mask, inputs.advantages[:, None]
        ratio = _ratio(inputs.logprobs, inputs.old_logprobs)
        risen = (ratio > 1 + settings.epsilon) & (advantages > 0)
        fallen = ((ratio < 1 - settings.epsilon) | (ratio > settings.delta)) & (advantages < 0)
        self.tokens += float(mask.sum())
        self.clipped += float(((risen | fallen) * mask).sum())
        self.entropy += float((inputs.entropy * mask).sum())
        self.drift += float((kl_estimate(inputs.logprobs, inputs.old_logprobs) * mask).sum())
        self.ratio_max = max(self.ratio_max, float((ratio * mask).max()))
        if inputs.reference_logprobs is not None:
            divergence = kl_estimate(inputs.logprobs, inputs.reference_logprobs)
            self.kl = (self.kl or 0.0) + float((divergence * mask).sum())

    def means(self) -> dict[str, float]:
        """Per-token means under the paper's names.

        `drift` is the divergence from the old log-probabilities, `kl` the one from the reference where there is one.
        """
        tokens = max(self.tokens, 1.0)
        means = {
            "clip_ratio": self.clipped / tokens,
            "entropy": self.entropy / tokens,
            "drift": self.drift / tokens,
            "ratio_max": self.ratio_max,
        }
        return means if self.kl is None else {**means, "kl": self.kl / tokens}
