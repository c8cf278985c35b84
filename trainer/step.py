"""One training step: rollouts in, a better policy and its metrics out (INTELLECT-2, sections 3.2 and 3.4).

Everything random is drawn from the recipe's seed and the step's number, so that a redo of a step from the same
checkpoint gives the same weights bit for bit. Leaves out where rollouts come from and where checkpoints go.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from protocol.errors import ConfigError
from trainer.groups import Sample, TrainingBatch, assemble_batch
from trainer.grpo import LossInputs, LossSums, grpo_loss, importance_weights
from trainer.optimiser import all_finite, set_learning_rate
from trainer.policy import Policy, TokenBatch, micro_batches, pack_batch
from trainer.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _MicroBatch:
    """A padded part of a minibatch with everything the loss needs but the policy's own log-probabilities."""

    tokens: TokenBatch
    advantages: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None
    importance: Tensor | None

    @property
    def tokens_held(self) -> float:
        return float(self.tokens.mask.sum())

    @property
    def rollouts_held(self) -> float:
        return float(len(self.advantages))


@dataclass
class _Tally:
    """What the optimiser steps of one training step gave."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    sums: LossSums = field(default_factory=LossSums)
    skipped: int = 0

    def metrics(self) -> dict[str, float]:
        return {
            "loss": _mean(self.losses),
            "grad_norm": _mean(self.grad_norms),
            "grad_norm_max": max(self.grad_norms, default=0.0),
            "updates": float(len(self.losses)),
            "skipped_updates": float(self.skipped),
            **self.sums.means(),
        }


class TrainStep:
    """Trains a policy in place, one batch a step."""

    def __init__(self, policy: Policy, optimiser: AdamW, recipe: Recipe, *, reference: Policy | None = None) -> None:
        if recipe.loss.kl_coefficient and reference is None:
            raise ConfigError("loss.kl_coefficient needs the reference policy, and none was given")
        self.policy = policy
        self.optimiser = optimiser
        self.recipe = recipe
        self.reference = reference

    def run(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Train on a step's batch; the metrics are under the paper's names. Raises MalformedError.

        The policy is unchanged if the batch is refused. A batch without any signal changes nothing and is no error.
        """
        batch = self._assemble(step, rollouts)
        rate = set_learning_rate(self.optimiser, self.recipe.optimiser, step)
        # Old log-probabilities are those of the policy before the step, so every minibatch is laid out before any
        # update is made.
        minibatches = [self._lay_out(samples) for samples in self._minibatches(step, self._useful(batch))]
        tally = _Tally()
        for minibatch in minibatches:
            self._update(minibatch, tally)
        return {**tally.metrics(), **_batch_metrics(batch), "learning_rate": rate}

    @property
    def _advantages_only(self) -> bool:
        return not self.recipe.loss.kl_coefficient and not self.recipe.loss.entropy_coefficient

    def _useful(self, batch: TrainingBatch) -> list[Sample]:
        # Without any signal the gradient is zero, and an update would follow old momentum alone.
        silent = not any(sample.advantage for sample in batch.samples)
        return [] if silent and self._advantages_only else batch.samples

    def _assemble(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> TrainingBatch:
        loss = self.recipe.loss
        return assemble_batch(
            rollouts,
            step=step,
            group_size=self.recipe.rollout.group_size,
            max_staleness=self.recipe.batch.max_staleness,
            vocab_size=self.policy.vocab_size,
            normalise=loss.advantage == "normalised",
            drop_without_signal=loss.drop_groups_without_signal and self._advantages_only,
        )

    def _minibatches(self, step: int, samples: list[Sample]) -> list[list[Sample]]:
        generator = torch.Generator().manual_seed(self.recipe.optimiser.seed * 1_000_003 + step)
        order = torch.randperm(len(samples), generator=generator).tolist()
        parts = min(self.recipe.optimiser.updates_per_step, len(samples))
        return [[samples[index] for index in order[part::parts]] for part in range(parts)]

    def _lay_out(self, samples: list[Sample]) -> list[_MicroBatch]:
        limit = self.recipe.optimiser.micro_batch_tokens
        buckets = micro_batches([sample.length for sample in samples], max_tokens=limit)
        return [self._micro_batch([samples[index] for index in bucket]) for bucket in buckets]

    @torch.no_grad()
    def _micro_batch(self, samples: list[Sample]) -> _MicroBatch:
        rollouts = [sample.rollout for sample in samples]
        tokens = pack_batch(
            [rollout.prompt_ids for rollout in rollouts],
            [rollout.output_ids for rollout in rollouts],
            device=self.policy.device,
        )
        recorded = tokens.align([rollout.logprobs for rollout in rollouts])
        old, importance = self._old_logprobs(tokens, recorded)
        temperature = self.recipe.rollout.temperature
        reference = self.reference.score(tokens, temperature)[0] if self.reference else None
        advantages = torch.tensor([sample.advantage for sample in samples], device=self.policy.device)
        return _MicroBatch(tokens, advantages, old, reference, importance)

    def _old_logprobs(self, tokens: TokenBatch, recorded: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = self.recipe.loss
        if loss.old_logprobs == "worker":
            return recorded, None
        old = self.policy.score(tokens, self.recipe.rollout.temperature)[0]
        if loss.importance_cap is None:
            return old, None
        return old, importance_weights(old, recorded, cap=loss.importance_cap)

    def _update(self, minibatch: list[_MicroBatch], tally: _Tally) -> None:
        settings = self.recipe.loss
        normaliser = sum(part.tokens_held if settings.level == "token" else part.rollouts_held for part in minibatch)
        self.optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.policy.device)
        for part in minibatch:
            inputs = self._loss_inputs(part)
            loss = grpo_loss(inputs, settings, normaliser=normaliser)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            tally.sums.add(inputs, settings)
        self._apply(total, tally)

    def _loss_inputs(self, part: _MicroBatch) -> LossInputs:
        logprobs, entropy = self.policy.score(
            part.tokens,
            self.recipe.rollout.temperature,
            with_entropy=self.recipe.loss.entropy_coefficient > 0,
        )
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=part.old_logprobs,
            advantages=part.advantages,
            mask=part.tokens.mask,
            entropy=entropy,
            reference_logprobs=part.reference_logprobs,
            importance=part.importance,
        )

    def _apply(self, loss: Tensor, tally: _Tally) -> None:
        parameters = self.policy.parameters().values()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.optimiser.max_grad_norm)
        if not all_finite(loss, grad_norm):
            tally.skipped += 1
            logger.warning("update skipped=not-finite loss=%s grad_norm=%s", loss.item(), grad_norm.item())
            return
        self.optimiser.step()
        tally.losses.append(loss.item())
        tally.grad_norms.append(grad_norm.item())


def _batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    return {
        "reward": batch.mean_reward,
        "staleness": batch.mean_staleness,
        "tokens": float(batch.tokens),
        "rollouts": float(batch.rollouts),
        "groups_without_signal": float(batch.groups_without_signal),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
