"""What a run needs, from its recipe and the shape of its model alone: memory per GPU, disk, rollouts, tokens, traffic.

Arithmetic for `run create --dry-run`, before anything is downloaded. Weights, gradients and optimiser state are exact;
activations are a count of the tensors that a Llama-like layer keeps for its gradient (after arXiv 2205.05198, section
4.1). Leaves out what libraries and processes take for themselves and what an allocator loses: plan a tenth more. Never
imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from protocol.errors import ModelError
from trainer.recipe import Recipe

FLOAT32: Final = 4
BYTES: Final = {"float32": 4, "bfloat16": 2}
MOMENTS: Final = 2
"""Of Adam, in float32."""
LAYERS_GATHERED: Final = 2
"""The one that computes, and the next, which FSDP fetches meanwhile."""
PIECE_LOGITS: Final = 1 << 26
"""Logits that are in memory at once (trainer.head)."""
LOGIT_COPIES: Final = 4
"""In float32: logits over temperature, their log-softmax, its exponential, and the product of both for the entropy."""

_Size = Annotated[int, Meta(ge=1, le=1 << 32)]


class ModelShape(Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family, as its config.json says."""

    model_type: str
    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size
    max_position_embeddings: _Size
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self._head_size

    @property
    def key_value_size(self) -> int:
        """Of keys; values have the same."""
        return (self.num_key_value_heads or self.num_attention_heads) * self._head_size

    @property
    def _head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        hidden, inner, query, kv = self.hidden_size, self.intermediate_size, self.query_size, self.key_value_size
        count = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner + 2 * hidden
        if self.model_type == "qwen2" or self.attention_bias:
            count += query + 2 * kv
        if self.model_type != "qwen2" and self.attention_bias:
            count += hidden
        if self.model_type == "qwen3":
            count += 2 * self._head_size  # norms of queries and keys
        return count + (2 * inner + hidden if self.mlp_bias else 0)

    @property
    def other_parameters(self) -> int:
        """Embeddings, the last norm, and the head unless it is the embeddings."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.num_hidden_layers * self.layer_parameters + self.other_parameters

    @property
    def layer_activations(self) -> int:
        """Values that a layer keeps for its gradient, a token: attention as one kernel, norms in float32.

        Input and output of both norms (with a float32 copy, counted twice), queries, keys, values and what attention
        gives, and the gate, its activation, the other half and their product.
        """
        norms = 2 * (self.hidden_size + 2 * self.hidden_size + self.hidden_size)
        return norms + 2 * (self.query_size + self.key_value_size) + 4 * self.intermediate_size


def model_shape(config: Mapping[str, Any], *, origin: str) -> ModelShape:
    """The shape that the fields of a config.json give. Raises ModelError that begins with `origin`."""
    try:
        shape = msgspec.convert(config, ModelShape)
    except msgspec.ValidationError as error:
        raise ModelError(f"{origin} has no shape that memory can be counted from: {error}") from error
    if shape.model_type not in ("llama", "qwen2", "qwen3"):
        raise ModelError(
            f"{origin} is a {shape.model_type[:40]!r}; memory is known of llama, qwen2 and qwen3",
            hint="create the run without --dry-run",
        )
    return shape


@dataclass(frozen=True)
class GpuBudget:
    """Bytes on each GPU at the peak of an optimiser step."""

    weights: int
    """Its share of the policy, in float32."""
    masters: int
    """Its share of the float32 masters, where the policy is published in bfloat16."""
    reference: int
    """Its share of the policy that the KL term compares with, where there is one."""
    gradients: int
    moments: int
    gathered: int
    """What FSDP has put together: two layers, embeddings and head, with gradients and once more for the reference."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return (
            self.weights + self.masters + self.reference + self.gradients + self.moments
            + self.gathered + self.activations + self.logits
        )  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """What a run needs in all."""

    parameters: int
    gpus: int
    """All in one machine, as many as processes."""
    gpu: GpuBudget
    gpu_loading_bytes: int
    """On each GPU once a policy is read: less than training takes later."""
    host_loading_bytes: int
    """Of the machine's memory while it is read: the largest tensor in parts, or with one process all of it."""
    host_bytes: int
    """Of the machine's memory at the peak: process 0 puts a checkpoint together in it, then writes it."""
    policy_bytes: int
    """Of one published policy: what every contributor downloads, patches aside."""
    checkpoint_bytes: int
    """Of one training checkpoint: the policy, masters and moments."""
    checkpoints_kept: int
    """At the end: the newest, those kept for good, and the one that is being written."""
    steps: int
    rollouts_per_step: int
    prompts_per_step: int
    updates_per_step: int
    tokens_per_step: int
    """Output tokens at most: every answer at the limit of its length."""
    expected_tokens_per_step: int | None
    """Output tokens if answers have the lengths they are asked for; None without length targets."""

    @property
    def disk_bytes(self) -> int:
        """Of training checkpoints on the trainer's disk at the end."""
        return self.checkpoints_kept * self.checkpoint_bytes


def gpu_budget(recipe: Recipe, shape: ModelShape) -> GpuBudget:
    """Bytes on each of `policy.processes` GPUs, a micro-batch of full length computing."""
    policy, tokens = recipe.policy, recipe.optimiser.micro_batch_tokens
    gpus, compute = policy.processes, BYTES[policy.compute]
    share = -(-shape.parameters // gpus)
    reference = bool(recipe.loss.kl_coefficient)
    gathered = (LAYERS_GATHERED * shape.layer_parameters + shape.other_parameters) * compute
    layer = tokens * shape.layer_activations * compute
    inputs = shape.num_hidden_layers * tokens * shape.hidden_size * compute
    return GpuBudget(
        weights=FLOAT32 * share,
        masters=FLOAT32 * share if policy.dtype == "bfloat16" else 0,
        reference=FLOAT32 * share if reference else 0,
        gradients=FLOAT32 * share,
        moments=MOMENTS * FLOAT32 * share,
        gathered=(2 + reference) * gathered if gpus > 1 else 0,
        activations=inputs + layer if policy.activation_checkpointing else shape.num_hidden_layers * layer,
        logits=min(tokens * shape.vocab_size, PIECE_LOGITS) * (compute + LOGIT_COPIES * FLOAT32),
    )


def run_budget(recipe: Recipe, shape: ModelShape) -> Budget:
    """What a recipe's run needs with a model of this shape."""
    masters = FLOAT32 if recipe.policy.dtype == "bfloat16" else 0
    policy_bytes = shape.parameters * BYTES[recipe.policy.dtype]
    checkpoint_bytes = policy_bytes + shape.parameters * (masters + MOMENTS * FLOAT32)
    rollouts, steps = recipe.batch.rollouts_per_step, recipe.batch.total_steps
    gpu, gpus = gpu_budget(recipe, shape), recipe.policy.processes
    host_loading = FLOAT32 * (shape.parameters if gpus == 1 else shape.vocab_size * shape.hidden_size)
    targets = recipe.rollout.length.targets if recipe.rollout.length else ()
    return Budget(
        parameters=shape.parameters,
        gpus=gpus,
        gpu=gpu,
        gpu_loading_bytes=gpu.weights + gpu.masters + gpu.reference,
        host_loading_bytes=host_loading,
        host_bytes=max(host_loading, checkpoint_bytes),
        policy_bytes=policy_bytes,
        checkpoint_bytes=checkpoint_bytes,
        checkpoints_kept=checkpoints_kept(steps, keep=recipe.keep_checkpoints, keep_every=recipe.keep_every) + 1,
        steps=steps,
        rollouts_per_step=rollouts,
        prompts_per_step=rollouts // recipe.rollout.group_size,
        updates_per_step=recipe.optimiser.updates_per_step,
        tokens_per_step=rollouts * recipe.rollout.max_new_tokens,
        expected_tokens_per_step=rollouts * sum(targets) // len(targets) if targets else None,
    )


def checkpoints_kept(steps: int, *, keep: int, keep_every: int) -> int:
    """Checkpoints on the disk once step `steps` is written, of 0 to `steps`."""
    newest = min(keep, steps + 1)
    older = steps + 1 - newest
    return newest + (-(-older // keep_every) if keep_every else 0)
