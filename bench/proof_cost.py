"""What proofs add to the CPU time of a generation: a random Llama of 135 million parameters, and the demo's policy.

The same answers with and without proofs, in turns, one thread. The difference of two long runs is mostly noise, so the
proof path (states to bf16, chunks, proofs) is timed inside the run as well; the goal is on that.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from safetensors.torch import save_file

from bench.harness import Result
from node.engines import draws
from node.engines.base import Generation, GenerationRequest, SamplingParams
from node.engines.model_config import read_config
from node.engines.proofs import ProofRecorder
from node.engines.torch_engine import TorchEngine
from node.engines.weights import expected_tensors
from node.run_create import model_directory, model_spec
from protocol.toploc import backend
from trainer.recipe import load_recipe

MOST_SHARE: Final = 0.01
PAIRS: Final = 3
LLAMA: Final = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMALL: Final = {**LLAMA, "vocab_size": 512, "num_hidden_layers": 2}
_TOP_K: Final = 128


@dataclass(frozen=True)
class Job:
    """A policy, its prompts, and how answers are drawn when they are proved."""

    model_dir: Path
    requests: list[GenerationRequest]
    sampling: SamplingParams

    def without_proofs(self) -> SamplingParams:
        sampling = self.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=sampling.stop_ids,
            top_k_proof=0,
        )


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one generation, and of two parts of it."""

    total_s: float
    proofs_s: float
    noise_s: float
    tokens: int


def bench(*, quick: bool) -> Result:
    """Both policies; `quick` takes a small random one and a single pair."""
    torch.set_num_threads(1)
    result = Result({"native": float(backend() == "native")})
    with tempfile.TemporaryDirectory(prefix="bench-proof-cost-") as work:
        job = llama_job(Path(work), SMALL if quick else LLAMA)
        _measure(result, "llama", job, pairs=1 if quick else PAIRS)
    if not quick:
        result.at_most("llama_proof_share", MOST_SHARE)
    _measure(result, "demo", demo_job(), pairs=1 if quick else 3 * PAIRS)
    return result


def llama_job(model_dir: Path, config: dict[str, Any]) -> Job:
    """Sixteen answers of 40 tokens, so a whole chunk and a short one each, from random weights."""
    (model_dir / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16) if "norm" in name else torch.randn(shape).mul_(0.02).bfloat16()
        for name, shape in expected_tensors(read_config(model_dir)).items()
    }
    save_file(weights, str(model_dir / "model.safetensors"))
    requests = [GenerationRequest(tuple(range(row, row + 16)), bytes([row]) * 32) for row in range(16)]
    return Job(model_dir, requests, SamplingParams(temperature=1.0, max_new_tokens=40, stop_ids=(), top_k_proof=_TOP_K))


def demo_job() -> Job:
    """A step's worth of the demo's answers, from its first policy."""
    recipe = load_recipe("demo")
    model_dir = model_directory(recipe.model.source)
    requests = [
        GenerationRequest((1, *(4 + (row * place) % 10 for place in range(1, 9))), row.to_bytes(32))
        for row in range(recipe.batch.rollouts_per_step)
    ]
    sampling = SamplingParams(
        temperature=recipe.rollout.temperature,
        max_new_tokens=recipe.rollout.max_new_tokens,
        stop_ids=model_spec(model_dir).stop_ids,
        top_k_proof=recipe.toploc.top_k,
    )
    return Job(model_dir, requests, sampling)


def _measure(result: Result, prefix: str, job: Job, *, pairs: int) -> None:
    engine = TorchEngine(max_batch=len(job.requests))
    engine.load(job.model_dir)
    proved, plain = [], []
    _generate(engine, job, job.sampling)
    for _ in range(pairs):
        plain.append(_generate(engine, job, job.without_proofs()))
        proved.append(_generate(engine, job, job.sampling))
    with_s, without_s = min(cost.total_s for cost in proved), min(cost.total_s for cost in plain)
    total_s, tokens = sum(cost.total_s for cost in proved), sum(cost.tokens for cost in proved)
    result.figures |= {
        f"{prefix}_tokens": proved[0].tokens,
        f"{prefix}_cpu_us_per_token": with_s / proved[0].tokens * 1e6,
        f"{prefix}_difference_share": with_s / without_s - 1,
    }
    for part, spent_s in (("proof", sum(c.proofs_s for c in proved)), ("noise", sum(c.noise_s for c in proved))):
        result.figures[f"{prefix}_{part}_us_per_token"] = spent_s / tokens * 1e6
        result.figures[f"{prefix}_{part}_share"] = spent_s / total_s


def _generate(engine: TorchEngine, job: Job, sampling: SamplingParams) -> Cost:
    with _timed(ProofRecorder, "add") as proofs, _timed(draws, "gumbel_rows") as noise:
        began = time.process_time()
        answers: Sequence[Generation] = engine.generate(job.requests, sampling)
        total_s = time.process_time() - began
    return Cost(total_s, sum(proofs), sum(noise), sum(len(answer.output_ids) for answer in answers))


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """CPU seconds of each call of a function while the block runs."""
    function: Callable[..., Any] = getattr(owner, name)
    spent_s: list[float] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        done = function(*args, **kwargs)
        spent_s.append(time.process_time() - began)
        return done

    with mock.patch.object(owner, name, call):
        yield spent_s
