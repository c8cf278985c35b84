"""`intellect-node eval --environment`: pass@k of a policy on one of the environments, with this machine's engine.

The prompts are those of a held-out set with a name (protocol.seeds.evaluation_seed): the same name gives the same
prompts and the same noise, so that two policies can be compared. Needs no lm-eval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from environments.registry import get_environment
from node.engines.base import SamplingParams
from node.engines.registry import engine_factory
from node.engines.tokenizer import Tokenizer
from node.evaluation import Progress, evaluate, held_out_work
from node.run_create import model_spec
from node.run_environment import extra_stop_ids, import_data
from protocol.errors import ConfigError
from protocol.seeds import evaluation_seed
from trainer.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to evaluate and how."""

    model: Path
    environment: str
    parameters: Mapping[str, Any]
    data: Path | None = None
    """A file of problems, for environments that take one."""
    prompts: int = 256
    samples: int = 4
    pass_at: tuple[int, ...] = (1,)
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """None: as many as the model has room for, 1024 at most."""
    held_out_set: str = "eval"
    engine: str = "torch"
    """One of node.engines.registry."""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1


def evaluate_environment(plan: Plan, *, progress: Progress | None = None) -> Evaluation:
    """Answer and judge. Raises EnvironmentUnknown, ModelError or ConfigError."""
    if max(plan.pass_at) > plan.samples:
        raise ConfigError(
            f"pass@{max(plan.pass_at)} cannot be told from {plan.samples} answers to a prompt",
            hint=f"give --samples {max(plan.pass_at)} or more",
        )
    environment = get_environment(plan.environment, parameters=plan.parameters)
    if plan.data is not None:
        data = import_data(environment, plan.data)
        environment = get_environment(plan.environment, parameters=plan.parameters, data=data)
    spec = model_spec(plan.model)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    engine = engine_factory(plan.engine)(dtype=plan.dtype, device=plan.device)
    tokenizer = Tokenizer(plan.model)
    engine.load(plan.model)
    seed = evaluation_seed(hashlib.sha256(plan.held_out_set.encode()).digest())
    work = held_out_work(environment, tokenizer, seed=seed, prompts=plan.prompts, samples=plan.samples)
    longest = max(len(assignment.prompt_ids) for assignment in work.assignments)
    sampling = SamplingParams(
        temperature=plan.temperature,
        max_new_tokens=plan.max_new_tokens or max(1, min(1024, spec.max_model_len - longest)),
        stop_ids=tuple(sorted({*spec.stop_ids, *extra_stop_ids(environment, plan.model)})),
        top_k_proof=0,
    )
    try:
        return evaluate(
            engine,
            tokenizer,
            work,
            sampling,
            max_model_len=spec.max_model_len,
            pass_at=plan.pass_at,
            progress=progress,
        )
    finally:
        environment.close()
