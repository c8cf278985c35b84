"""Tokens a CPU-second of the engines and of transformers' generate with log-probabilities: demo policy, or SmolLM2.

One thread, answers of a fixed length, the same requests for all, in turns. transformers samples with its own noise and
gives the log-probabilities of its tokens; the engines' noise is the protocol's, and proofs are made where it says so.
`--model smollm2` takes SmolLM2-135M. vLLM is measured where it is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

from bench.harness import Result
from node.engines.base import Engine, GenerationRequest, SamplingParams
from node.engines.registry import engine_factory
from node.run_create import model_directory
from protocol.errors import ModelError
from trainer.smollm2 import smollm2_directory

BATCH: Final = 64
GROUP: Final = 8
DEMO_RATIO: Final = 2.0
SMOLLM2_RATIO: Final = 1.3
_TOP_K: Final = {"demo": 16, "smollm2": 128}


@dataclass(frozen=True)
class Job:
    """One policy and what it is asked."""

    name: str
    model_dir: Path
    prompts: list[list[int]]
    new_tokens: int
    rounds: int

    @property
    def requests(self) -> list[GenerationRequest]:
        return [GenerationRequest(prompt, row.to_bytes(32)) for row, prompt in enumerate(self.prompts)]

    def sampling(self, top_k: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, max_new_tokens=self.new_tokens, stop_ids=(), top_k_proof=top_k)


def bench(*, quick: bool, model: str = "demo") -> Result:
    """All engines that are installed, beside transformers; ratios are medians over rounds."""
    torch.set_num_threads(1)
    if model not in _TOP_K:
        raise ModelError(f"this benchmark has no model {model[:40]!r}", hint=f"give one of {', '.join(_TOP_K)}")
    result = Result()
    table = Table(title="tokens a CPU-second, batch 64, one thread", title_justify="left")
    for column in ("prompts", "transformers", "engine", "without proofs", "ratio", "with proofs", "ratio"):
        table.add_column(column)
    for label, group in (("different", 1), ("groups of 8", GROUP)):
        _measure(result, table, label, _job(model, quick=quick, group=group))
    result.tables.append(table)
    result.at_least("torch_different_ratio", SMOLLM2_RATIO if model == "smollm2" else DEMO_RATIO)
    return result


def _job(model: str, *, quick: bool, group: int) -> Job:
    if model == "smollm2":
        prompts = [[100 + row // group + place for place in range(32)] for row in range(BATCH)]
        return Job(model, smollm2_directory(), prompts, 2 if quick else 24, 1 if quick else 3)
    prompts = [[1, *(4 + (7 * (row // group) + place * place) % 10 for place in range(8))] for row in range(BATCH)]
    return Job(model, model_directory("sort-digits"), prompts, 12 if quick else 48, 2 if quick else 15)


def _measure(result: Result, table: Table, label: str, job: Job) -> None:
    theirs = _transformers(job)
    engines = {name: _engine(name, job) for name in ("torch", "vllm")}
    runs: dict[str, list[float]] = {"transformers": []}
    for _ in range(job.rounds):
        runs["transformers"].append(_speed(job, theirs))
        for name, run in engines.items():
            for kind, top_k in (("plain", 0), ("proved", _TOP_K[job.name])):
                if run is not None:
                    runs.setdefault(f"{name} {kind}", []).append(_speed(job, partial(run, top_k)))
    for name, run in engines.items():
        _record(result, table, (label, name), runs) if run is not None else table.add_row(
            label, "", name, "not installed"
        )
    result.figures[f"transformers_{label.split()[0]}_tokens_per_cpu_s"] = max(runs["transformers"])


def _record(result: Result, table: Table, row: tuple[str, str], runs: dict[str, list[float]]) -> None:
    label, name = row
    shown = [label, f"{max(runs['transformers']):,.0f}", name]
    for kind, end in (("plain", ""), ("proved", "_proved")):
        speeds = runs[f"{name} {kind}"]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds, runs["transformers"], strict=True))
        prefix = f"{name}_{label.split()[0]}"
        result.figures |= {f"{prefix}_tokens_per_cpu_s{end}": max(speeds), f"{prefix}_ratio{end}": ratio}
        shown += [f"{max(speeds):,.0f}", f"{ratio:.2f}"]
    table.add_row(*shown)


def _speed(job: Job, run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return len(job.prompts) * job.new_tokens / (time.process_time() - started)


def _engine(name: str, job: Job) -> Callable[[int], Any] | None:
    """None where it is not installed."""
    try:
        engine: Engine = engine_factory(name)(max_batch=BATCH)
    except ModelError:
        return None
    engine.load(job.model_dir)
    engine.generate(job.requests, job.sampling(0))
    return lambda top_k: engine.generate(job.requests, job.sampling(top_k))


def _transformers(job: Job) -> Callable[[], Any]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(job.model_dir), dtype=torch.float32)
    tokens = torch.tensor(job.prompts)
    settings = {
        "attention_mask": torch.ones_like(tokens),
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "temperature": 1.0,
        "max_new_tokens": job.new_tokens,
        "min_new_tokens": job.new_tokens,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_scores": True,
        "return_dict_in_generate": True,
    }

    def run() -> Any:
        made = model.generate(tokens, **settings)
        return model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)

    run()
    return run
