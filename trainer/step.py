"""One training step: rollouts in, a better policy and its metrics out (INTELLECT-2, sections 3.2 to 3.5).

Everything random is drawn from the recipe's seed and the step's number, so that a redo of a step from the same
checkpoint gives the same weights bit for bit. In a trainer of several processes each takes its share of every
micro-batch list, and all of them get the same answer. Leaves out where rollouts come from and where checkpoints go.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from protocol.errors import ConfigError, TrainingError
from trainer.groups import Sample, TrainingBatch, assemble_batch
from trainer.grpo import LossInputs, LossSums, grpo_loss, importance_weights, token_losses
from trainer.optimiser import MasterAdamW, all_finite, clip_gradients, not_finite, set_learning_rate
from trainer.packing import Laid, Layout, choose_layout, lay_out
from trainer.parallel import World
from trainer.policy import Policy
from trainer.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _MicroBatch:
    """A part of a minibatch with everything the loss needs but the policy's own log-probabilities."""

    laid: Laid
    advantages: Tensor
    """[N], as the next ones."""
    old_logprobs: Tensor | None
    """None: the policy's own as it is when this is trained on."""
    reference_logprobs: Tensor | None
    importance: Tensor | None
    counts: bool
    """False for one that only keeps this process in step with the others."""


@dataclass(frozen=True)
class _Minibatch:
    """What one optimiser step is made of, over all processes and in this one."""

    tokens: int
    """Answer tokens in all processes; as the next one, what its loss is divided by."""
    rollouts: int
    parts: list[_MicroBatch]


@dataclass
class _Tally:
    """What the optimiser steps of one training step gave."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    sums: LossSums = field(default_factory=LossSums)
    skipped: int = 0
    micro_batches: int = 0
    places: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    """Tokens of prompts and answers, places computed, and those of padding."""

    def share(self, world: World) -> None:
        world.sum(self.sums.sums)
        world.sum(self.places)
        world.greatest(self.sums.ratio_max)

    def metrics(self, *, with_kl: bool) -> dict[str, float]:
        tokens, slots, padding = self.places.tolist()
        return {
            "loss": _mean(self.losses),
            "loss_max": max(map(abs, self.losses), default=0.0),
            "grad_norm": _mean(self.grad_norms),
            "grad_norm_max": max(self.grad_norms, default=0.0),
            "updates": float(len(self.losses)),
            "skipped_updates": float(self.skipped),
            "micro_batches": float(self.micro_batches),
            "padding": padding / max(slots, 1.0),
            "computed_share": slots / max(tokens, 1.0),
            **self.sums.means(with_kl=with_kl),
        }


class TrainStep:
    """Trains a policy in place, one batch a step."""

    def __init__(
        self,
        policy: Policy,
        optimiser: MasterAdamW,
        recipe: Recipe,
        *,
        reference: Policy | None = None,
    ) -> None:
        """Of several processes each makes one, over its share of the policy. Raises ConfigError or ModelError."""
        if recipe.loss.kl_coefficient and reference is None:
            raise ConfigError("loss.kl_coefficient needs the reference policy, and none was given")
        self.policy = policy
        self.optimiser = optimiser
        self.recipe = recipe
        self.reference = reference
        self.world = policy.world
        self._skipped_in_a_row = 0
        self._sound_step = 0
        """The newest checkpoint of which no optimiser step since was skipped."""
        policy.prepare()
        if reference is not None:
            reference.prepare()

    def run(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Train on a step's batch; the metrics are under the paper's names.

        The policy is unchanged if the batch is refused (MalformedError). A batch without any signal changes nothing and
        is no error. Raises TrainingError when too many optimiser steps in a row had to be skipped, or when the policy
        is not finite: what is in memory must not be saved then.
        """
        if not self._skipped_in_a_row:
            self._sound_step = step
        batch = self._assemble(step, rollouts)
        rate = set_learning_rate(self.optimiser, self.recipe.optimiser, step)
        samples = self._useful(batch)
        layout = self._layout(samples)
        # Old log-probabilities are those of the policy before the step, so every minibatch is laid out before any
        # update is made.
        minibatches = [self._lay_out(part, layout) for part in self._minibatches(step, samples)]
        tally = _Tally()
        for minibatch in minibatches:
            self._update(minibatch, tally)
        self._require_finite()
        tally.share(self.world)
        return {**tally.metrics(with_kl=self.reference is not None), **_batch_metrics(batch), "learning_rate": rate}

    @property
    def _advantages_only(self) -> bool:
        loss = self.recipe.loss
        drifts = loss.objective == "masked" and loss.mask_drift_coefficient
        return not (loss.kl_coefficient or loss.entropy_coefficient or drifts)

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
            max_length=self.policy.max_length,
            advantage=loss.advantage,
            drop_without_signal=loss.drop_groups_without_signal and self._advantages_only,
        )

    def _layout(self, samples: Sequence[Sample]) -> Layout:
        layout = self.recipe.policy.layout
        if not self.policy.packs:
            return "padded"
        return choose_layout([sample.pair for sample in samples]) if layout == "auto" else layout

    def _minibatches(self, step: int, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Whole groups an optimiser step, so that each sees answers that are better and worse than their like.

        With fewer groups than optimiser steps the answers are dealt out one by one.
        """
        updates = self.recipe.optimiser.updates_per_step
        units = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group)]
        if len(units) < updates:
            units = [[sample] for sample in samples]
        generator = torch.Generator().manual_seed(self.recipe.optimiser.seed * 1_000_003 + step)
        order = torch.randperm(len(units), generator=generator).tolist()
        parts = min(updates, len(units))
        return [[sample for index in order[part::parts] for sample in units[index]] for part in range(parts)]

    def _lay_out(self, samples: Sequence[Sample], layout: Layout) -> _Minibatch:
        limit = self.recipe.optimiser.micro_batch_tokens
        pairs = [sample.pair for sample in samples]
        everything = lay_out(pairs, layout, max_tokens=limit, ways=self.world.size, device=self.policy.device)
        mine = self._share(everything)
        return _Minibatch(
            tokens=sum(len(output) for _, output in pairs),
            rollouts=len(samples),
            parts=[self._micro_batch(laid, samples, counts=counts) for laid, counts in mine],
        )

    def _share(self, everything: Sequence[Laid]) -> list[tuple[Laid, bool]]:
        """This process's micro-batches, as many as every other's: FSDP counts calls. Those added count for nothing."""
        by_size = sorted(everything, key=lambda laid: laid.slots)
        mine = [(laid, True) for laid in by_size[self.world.rank :: self.world.size]]
        rounds = -(-len(by_size) // self.world.size)
        return mine + [(by_size[0], False)] * (rounds - len(mine))

    @torch.no_grad()
    def _micro_batch(self, laid: Laid, samples: Sequence[Sample], *, counts: bool) -> _MicroBatch:
        members = [samples[member] for member in laid.members]
        advantages = torch.tensor([sample.advantage for sample in members], device=self.policy.device)
        recorded = laid.flatten([sample.rollout.logprobs for sample in members])
        old, importance = self._old_logprobs(laid, recorded)
        temperature = self.recipe.rollout.temperature
        reference = self.reference.score(laid, temperature)[0] if self.reference else None
        return _MicroBatch(laid, advantages.index_select(0, laid.owner), old, reference, importance, counts)

    def _old_logprobs(self, laid: Laid, recorded: Tensor) -> tuple[Tensor | None, Tensor | None]:
        loss = self.recipe.loss
        if loss.old_logprobs == "worker":
            return recorded, None
        if loss.importance_cap is None and self.recipe.optimiser.updates_per_step == 1:
            return None, None
        old = self.policy.score(laid, self.recipe.rollout.temperature)[0]
        if loss.importance_cap is None:
            return old, None
        return old, importance_weights(old, recorded, cap=loss.importance_cap)

    def _update(self, minibatch: _Minibatch, tally: _Tally) -> None:
        settings = self.recipe.loss
        normaliser = float(minibatch.tokens if settings.level == "token" else minibatch.rollouts)
        self.optimiser.zero_grad(set_to_none=True)
        self.policy.model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.policy.device)
        for part in minibatch.parts:
            inputs = self._loss_inputs(part)
            outcome = token_losses(inputs, settings)
            loss = grpo_loss(outcome, inputs.owner, settings, normaliser=normaliser)
            loss = loss if part.counts else 0.0 * loss
            (self.world.size * loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self._count(part, tally)
            if part.counts:
                tally.sums.add(inputs, outcome)
        self._apply(self.world.sum(total), tally)

    def _count(self, part: _MicroBatch, tally: _Tally) -> None:
        laid = part.laid
        tally.micro_batches += 1
        tally.places += torch.tensor(
            [laid.tokens, laid.slots, laid.padding] if part.counts else [0, laid.slots, laid.slots],
            dtype=torch.float64,
        )

    def _loss_inputs(self, part: _MicroBatch) -> LossInputs:
        logprobs, entropy = self.policy.score(
            part.laid,
            self.recipe.rollout.temperature,
            with_entropy=self.recipe.loss.entropy_coefficient > 0,
        )
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if part.old_logprobs is None else part.old_logprobs,
            advantages=part.advantages,
            owner=part.laid.owner,
            entropy=entropy,
            reference_logprobs=part.reference_logprobs,
            importance=part.importance,
        )

    def _apply(self, loss: Tensor, tally: _Tally) -> None:
        grad_norm = clip_gradients(self.optimiser, self.recipe.optimiser.max_grad_norm)
        if not all_finite(loss, grad_norm):
            self._skip(loss, grad_norm, tally)
            return
        self.optimiser.step()
        self._skipped_in_a_row = 0
        tally.losses.append(loss.item())
        tally.grad_norms.append(grad_norm.item())

    def _skip(self, loss: Tensor, grad_norm: Tensor, tally: _Tally) -> None:
        tally.skipped += 1
        self._skipped_in_a_row += 1
        logger.warning("update skipped=not-finite loss=%s grad_norm=%s", loss.item(), grad_norm.item())
        if self._skipped_in_a_row >= self.recipe.optimiser.max_skipped_in_a_row:
            raise TrainingError(
                f"{self._skipped_in_a_row} optimiser steps in a row had a loss or gradient that is not finite "
                f"(the last: loss {loss.item():g}, gradient norm {grad_norm.item():g}); the policy has diverged",
                hint=self._way_on(),
            )

    def _require_finite(self) -> None:
        bad = not_finite(self.optimiser)
        count = int(self.world.sum(torch.tensor(len(bad))))
        if count:
            where = f"first {bad[0]}" if bad else "in another process of the trainer"
            raise TrainingError(
                f"after its optimiser steps {count} parameters of the policy hold values that are not finite "
                f"({where}); this step is not saved",
                hint=self._way_on(),
            )

    def _way_on(self) -> str:
        return (
            f"checkpoint {self._sound_step} is sound: `intellect-node policy export --data-dir DIR --step "
            f"{self._sound_step} --out POLICY`, then create a new run whose recipe has model.source = POLICY and a "
            "lower optimiser.learning_rate"
        )


def _batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    return {
        "reward": batch.mean_reward,
        "task_reward": batch.mean_task_reward,
        "length_penalty": batch.mean_task_reward - batch.mean_reward,
        "staleness": batch.mean_staleness,
        "staleness_max": float(batch.staleness_max),
        "tokens": float(batch.tokens),
        "rollouts": float(batch.rollouts),
        "groups_without_signal": float(batch.groups_without_signal),
        "rollouts_without_reward": float(batch.rollouts_without_reward),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
