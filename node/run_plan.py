"""`run create --dry-run`: what a recipe resolves to and what its run would need, without the model's weights.

The shape of a model comes from its directory, from the shapes that ship with the recipes, or from the config.json alone
of a Hugging Face id. Nothing is written. Never imports torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from environments.registry import get_environment
from node.run_create import SMOLLM2, hub_file, read_json_object, shipped_model
from protocol.errors import ConfigError, ModelError
from trainer.budget import Budget, ModelShape, model_shape, run_budget
from trainer.recipe import RECIPES_DIR, Recipe, load_recipe

SHAPES_DIR: Final = RECIPES_DIR / "shapes"
_GPU_BYTES: Final = {"H100 80 GB": 80e9, "H200 141 GB": 141e9, "B200 180 GB": 180e9}


def plan_run(recipe_source: str) -> dict[str, Any]:
    """What is known of a recipe's run before it is made. Raises ConfigError, ModelError, EnvironmentUnknown."""
    recipe = load_recipe(recipe_source)
    environment = get_environment(recipe.environment.name, parameters=recipe.environment.parameters)
    shape = source_shape(recipe.model.source)
    if recipe.rollout.max_new_tokens >= shape.max_position_embeddings:
        raise ConfigError(
            f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens} leaves no room for a prompt: "
            f"{recipe.model.source} takes {shape.max_position_embeddings} tokens in all"
        )
    budget = run_budget(recipe, shape)
    return {
        "recipe": recipe.name,
        "model": recipe.model.source,
        "environment": f"{environment.name} version {environment.version}",
        **_sizes(budget),
        "learning": _learning(recipe),
        "guesses": recipe.guesses,
    }


def source_shape(source: str) -> ModelShape:
    """The shape of a recipe's model. Raises ModelError."""
    directory = Path(source) if Path(source).is_dir() else shipped_model(source)
    if directory is not None:
        return model_shape(read_json_object(directory / "config.json"), origin=str(directory))
    shipped = SHAPES_DIR / f"{source.lower().replace('/', '--')}.toml"
    if shipped.is_file():
        return model_shape(tomllib.loads(shipped.read_text(encoding="utf-8")), origin=source)
    if source == SMOLLM2:
        raise ModelError(f"the shape of {source} is missing from this installation", hint="install it again")
    return model_shape(read_json_object(hub_file(source, "config.json")), origin=source)


def _sizes(budget: Budget) -> dict[str, Any]:
    gpu = budget.gpu
    return {
        "parameters": budget.parameters,
        "steps": budget.steps,
        "rollouts_per_step": budget.rollouts_per_step,
        "prompts_per_step": budget.prompts_per_step,
        "updates_per_step": budget.updates_per_step,
        "tokens_per_step_at_most": budget.tokens_per_step,
        "tokens_per_step_if_targets_are_met": budget.expected_tokens_per_step,
        "policy_bytes": budget.policy_bytes,
        "checkpoint_bytes": budget.checkpoint_bytes,
        "checkpoints_kept": budget.checkpoints_kept,
        "disk_bytes": budget.disk_bytes,
        "gpus": budget.gpus,
        "gpu_loading_bytes": budget.gpu_loading_bytes,
        "host_loading_bytes": budget.host_loading_bytes,
        "host_bytes": budget.host_bytes,
        "gpu_bytes": {
            "weights": gpu.weights,
            "masters": gpu.masters,
            "reference": gpu.reference,
            "gradients": gpu.gradients,
            "optimiser": gpu.moments,
            "gathered": gpu.gathered,
            "activations": gpu.activations,
            "logits": gpu.logits,
            "total": gpu.total,
        },
    }


def _learning(recipe: Recipe) -> dict[str, Any]:
    optimiser, loss, length = recipe.optimiser, recipe.loss, recipe.rollout.length
    return {
        "learning_rate": optimiser.learning_rate,
        "warm_up_steps": optimiser.warm_up_steps,
        "max_grad_norm": optimiser.max_grad_norm,
        "group_size": recipe.rollout.group_size,
        "epsilon": loss.epsilon,
        "delta": loss.delta,
        "kl_coefficient": loss.kl_coefficient,
        "entropy_coefficient": loss.entropy_coefficient,
        "old_logprobs": loss.old_logprobs,
        "asynchrony": recipe.batch.max_staleness,
        "length_targets": list(length.targets) if length else [],
        "alpha": length.alpha if length else None,
        "micro_batch_tokens": optimiser.micro_batch_tokens,
    }


def plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    """A plan as people read it."""
    yield f"recipe        {plan['recipe']}"
    yield f"model         {plan['model']}, {plan['parameters']:,} parameters"
    yield f"environment   {plan['environment']}"
    yield (
        f"steps         {plan['steps']}, each {plan['rollouts_per_step']:,} rollouts of {plan['prompts_per_step']:,} "
        f"prompts in {plan['updates_per_step']} optimiser steps"
    )
    yield f"tokens        {_tokens(plan)}"
    yield f"policy        {_gb(plan['policy_bytes'])}: what each contributor downloads first, and a step at most"
    yield (
        f"checkpoint    {_gb(plan['checkpoint_bytes'])} with masters and moments; {plan['checkpoints_kept']} on the "
        f"trainer's disk: {_gb(plan['disk_bytes'])}"
    )
    gpu = dict(plan["gpu_bytes"])
    total = gpu.pop("total")
    yield (
        f"loading       {_gb(plan['gpu_loading_bytes'])} on each GPU, {_gb(plan['host_loading_bytes'])} of the "
        "machine's memory"
    )
    yield (
        f"host memory   {_gb(plan['host_bytes'])}, where one process puts a checkpoint together; all GPUs are of one "
        "machine"
    )
    yield f"memory        {_gb(total)} on each of {plan['gpus']} GPUs, and a tenth more for what is not counted:"
    yield from (f"                {_gb(size):>10}  {name}" for name, size in gpu.items() if size)
    yield f"              {_verdict(total, gpu)}"
    yield f"learning      {json.dumps(plan['learning'])[1:-1].replace(chr(34), '')}"
    yield from (f"warning       {name} is a guess: {how}" for name, how in plan["guesses"].items())


def _tokens(plan: dict[str, Any]) -> str:
    expected = plan["tokens_per_step_if_targets_are_met"]
    most = f"{plan['tokens_per_step_at_most']:,} a step at most"
    return most if expected is None else f"{most}, {expected:,} if answers have the lengths they are asked for"


def _verdict(total: float, parts: dict[str, int]) -> str:
    fitting = [name for name, size in _GPU_BYTES.items() if 1.1 * total <= size]
    if fitting:
        return f"fits a GPU of the size of {fitting[0]}"
    largest = max(parts, key=lambda name: parts[name])
    hint = "lower optimiser.micro_batch_tokens" if largest in ("logits", "activations") else "raise policy.processes"
    return f"more than any GPU in this list: {', '.join(_GPU_BYTES)}; the largest part is {largest}: {hint}"


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
