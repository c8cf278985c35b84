"""Group relative policy optimisation: advantages, and a policy objective with its KL and entropy terms.

INTELLECT-2, section 3.4; the objectives themselves are trainer.objectives'. Per-token tensors are [N]: the answer
tokens of a micro-batch laid end to end, nothing else. Sums are divided by what the caller says a whole optimiser step
holds, so that neither micro-batches nor processes change the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from protocol.errors import ConfigError
from trainer.objectives import OBJECTIVES, Outcome, Tokens, ratio_of
from trainer.recipe import LossSettings

Advantage = Literal["normalised", "centred", "length_weighted"]

_STD_FLOOR = 1e-6
_LOG_RATIO_LIMIT = 20.0


def group_advantages(rewards: Tensor, *, kind: Advantage = "normalised", lengths: Tensor | None = None) -> Tensor:
    """Reward minus the group's baseline, [groups, group_size] → same.

    `normalised` divides by the group's standard deviation; `length_weighted` (arXiv 2505.23585, section 3) takes for
    its baseline the mean that weighs each reward by its answer's length, and needs `lengths` of the same shape. A group
    whose rewards are all equal has advantages of exactly zero. Raises ConfigError for groups of one.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ConfigError(
            f"rewards of shape {tuple(rewards.shape)} hold no groups of two or more: nothing to compare a rollout with",
            hint="set rollout.group_size to 2 or more",
        )
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    weights = torch.ones_like(rewards)
    if kind == "length_weighted":
        if lengths is None:
            raise ConfigError("length-weighted advantages need the lengths of the answers, and none were given")
        weights = lengths.to(rewards.dtype)
    baseline = (rewards * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
    centred = (rewards - baseline).masked_fill(equal, 0.0)
    return centred / (rewards.std(dim=1, keepdim=True) + _STD_FLOOR) if kind == "normalised" else centred


@dataclass(frozen=True)
class LossInputs:
    """What the loss compares, [N] each."""

    logprobs: Tensor
    """Of the policy being trained; carries the gradient."""
    old_logprobs: Tensor
    """Where the ratio is 1: of the policy that sampled, or of the one before the step."""
    advantages: Tensor
    owner: Tensor
    """To which answer of the micro-batch each token belongs: 0, 1, 2 …"""
    entropy: Tensor
    reference_logprobs: Tensor | None = None
    """Of the policy that the run began with; needed for a KL term."""
    importance: Tensor | None = None
    """Weights of tokens, for rollouts of a staler policy than `old_logprobs`."""


def token_losses(inputs: LossInputs, settings: LossSettings) -> Outcome:
    """The loss of each token, with its KL and entropy terms, and what the objective said of it."""
    tokens = Tokens(inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.owner)
    outcome = OBJECTIVES[settings.objective](tokens, settings)
    loss = outcome.loss
    if inputs.importance is not None:
        loss = loss * inputs.importance
    if settings.kl_coefficient and inputs.reference_logprobs is not None:
        loss = loss + settings.kl_coefficient * kl_estimate(inputs.logprobs, inputs.reference_logprobs)
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * inputs.entropy
    return outcome._replace(loss=loss)


def grpo_loss(outcome: Outcome, owner: Tensor, settings: LossSettings, *, normaliser: float) -> Tensor:
    """A micro-batch's share of an optimiser step's loss.

    `normaliser` is what the whole optimiser step holds: its tokens (level `token`) or its rollouts (level `sample`).
    """
    losses = outcome.loss
    if settings.level == "sample":
        losses = losses / torch.bincount(owner).index_select(0, owner)
    return losses.sum() / normaliser


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), never negative, with its gradient in `logprobs`."""
    difference = (reference - logprobs).clamp(max=_LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1


def importance_weights(old_logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float) -> Tensor:
    """How much likelier each token was before the step than when it was sampled, at most `cap`."""
    return ratio_of(old_logprobs, behaviour_logprobs).clamp(max=cap)


@dataclass
class LossSums:
    """Sums over tokens, from which true means are taken whatever the micro-batches and processes were."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """Tokens, clipped, entropy, drift, kl."""
    ratio_max: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def add(self, inputs: LossInputs, outcome: Outcome) -> None:
        """Count a micro-batch."""
        kl = torch.zeros((), device=inputs.logprobs.device)
        if inputs.reference_logprobs is not None:
            kl = kl_estimate(inputs.logprobs, inputs.reference_logprobs).sum()
        added = [
            outcome.clipped.sum(),
            inputs.entropy.sum(),
            kl_estimate(inputs.logprobs, inputs.old_logprobs).sum(),
            kl,
        ]
        self.sums[0] += len(inputs.logprobs)
        self.sums[1:] += torch.stack([one.double() for one in added]).cpu()
        self.ratio_max = torch.maximum(self.ratio_max, outcome.ratio.max().double().cpu())

    def means(self, *, with_kl: bool) -> dict[str, float]:
        """Per-token means under the paper's names.

        `drift` is the divergence from the old log-probabilities, `kl` the one from the reference, if there was one.
        """
        tokens, clipped, entropy, drift, kl = self.sums.tolist()
        count = max(tokens, 1.0)
        means = {
            "clip_ratio": clipped / count,
            "entropy": entropy / count,
            "drift": drift / count,
            "ratio_max": float(self.ratio_max),
        }
        return {**means, "kl": kl / count} if with_kl else means
