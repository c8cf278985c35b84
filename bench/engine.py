"""Tokens a CPU-second of the engines and of transformers' generate with log-probabilities: demo policy, or SmolLM2.

One thread, answers of a fixed length, the same requests for all, in turns. transformers samples with its own noise and
gives the log-probabilities of its tokens; the engines' noise is the protocol's, and proofs are made where it says so.
`--model smollm2` takes SmolLM2-135M. vLLM is measured where it is installed, beside itself alone: its own sampler,
neither log-probabilities nor proofs. `--only vllm` leaves the others out.
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
OF_ALONE_RATIO: Final = 0.95
"""What vLLM with noise, log-probabilities and proofs keeps of vLLM alone, on the model of 135M."""
_ALONE: Final = "vllm alone"
_PAIRS: Final = 3
"""A difference of a few hundredths needs so many times the rounds: one run varies by a tenth."""
_UPDATES: Final = 3
_ENGINES: Final = ("torch", "vllm")
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


Run = Callable[[Job], Any]


def bench(*, quick: bool, model: str = "demo", only: str = "") -> Result:
    """All engines that are installed, beside transformers, or `only` one; ratios are medians over rounds."""
    torch.set_num_threads(1)
    for given, known in ((model, [*_TOP_K]), (only or _ENGINES[0], _ENGINES)):
        if given not in known:
            raise ModelError(f"this benchmark has no {given[:40]!r}", hint=f"give one of {', '.join(known)}")
    result = Result()
    table = Table(title="tokens a CPU-second, batch 64, one thread", title_justify="left")
    for column in (
        "prompts",
        "transformers",
        "engine",
        "without proofs",
        "ratio",
        "with proofs",
        "ratio",
        "of vLLM alone",
    ):
        table.add_column(column)
    runs = _runs(_job(model, quick=quick, group=1), only, result)
    for label, group in (("different", 1), ("groups of 8", GROUP)):
        _measure(result, table, label, _job(model, quick=quick, group=group), runs)
    result.tables.append(table)
    if not only:
        result.at_least("torch_different_ratio", SMOLLM2_RATIO if model == "smollm2" else DEMO_RATIO)
    if model == "smollm2" and _ALONE in runs:
        result.at_least("vllm_different_of_alone", OF_ALONE_RATIO)
    return result


def _job(model: str, *, quick: bool, group: int) -> Job:
    if model == "smollm2":
        prompts = [[100 + row // group + place for place in range(32)] for row in range(BATCH)]
        return Job(model, smollm2_directory(), prompts, 2 if quick else 24, 1 if quick else 3)
    prompts = [[1, *(4 + (7 * (row // group) + place * place) % 10 for place in range(8))] for row in range(BATCH)]
    return Job(model, model_directory("sort-digits"), prompts, 12 if quick else 48, 2 if quick else 15)


def _runs(job: Job, only: str, result: Result) -> dict[str, Run]:
    """What is measured, each with the policy in memory."""
    runs: dict[str, Run] = {} if only else {"transformers": _transformers(job)}
    for name in [only] if only else _ENGINES:
        run = _engine(name, job, result)
        if run is not None:
            runs |= {f"{name} plain": partial(run, 0), f"{name} proved": partial(run, _TOP_K[job.name])}
    if "vllm plain" in runs:
        runs[_ALONE] = _vllm_alone(job)
    return runs


def _measure(result: Result, table: Table, label: str, job: Job, runs: dict[str, Run]) -> None:
    for run in runs.values():
        run(job)
    speeds = _speeds(job, {name: run for name, run in runs.items() if name != _ALONE}, rounds=job.rounds)
    for name in _ENGINES:
        if f"{name} plain" in speeds:
            _record(result, table, (label, name), speeds)
    if _ALONE in runs:
        pair = {name: runs[name] for name in ("vllm proved", _ALONE)}
        _record_alone(result, table, label, _speeds(job, pair, rounds=_PAIRS * job.rounds))
    if "transformers" in speeds:
        result.figures[f"transformers_{label.split()[0]}_tokens_per_cpu_s"] = max(speeds["transformers"])


def _speeds(job: Job, runs: dict[str, Run], *, rounds: int) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            speeds[name].append(_speed(job, run))
    return speeds


def _record(result: Result, table: Table, row: tuple[str, str], runs: dict[str, list[float]]) -> None:
    label, name = row
    theirs = runs.get("transformers", [])
    shown = [label, f"{max(theirs):,.0f}" if theirs else "", name]
    for kind, end in (("plain", ""), ("proved", "_proved")):
        speeds = runs[f"{name} {kind}"]
        prefix = f"{name}_{label.split()[0]}"
        result.figures[f"{prefix}_tokens_per_cpu_s{end}"] = max(speeds)
        shown.append(f"{max(speeds):,.0f}")
        if theirs:
            result.figures[f"{prefix}_ratio{end}"] = ratio = _ratio(speeds, theirs)
            shown.append(f"{ratio:.2f}")
        else:
            shown.append("")
    table.add_row(*shown)


def _record_alone(result: Result, table: Table, label: str, runs: dict[str, list[float]]) -> None:
    """vLLM by itself, and what the engine with everything keeps of it."""
    alone, prefix = runs[_ALONE], f"vllm_{label.split()[0]}"
    share = _ratio(runs["vllm proved"], alone)
    result.figures |= {f"{prefix}_alone_tokens_per_cpu_s": max(alone), f"{prefix}_of_alone": share}
    table.add_row(label, "", _ALONE, f"{max(alone):,.0f}", "", "", "", f"{share:.2f}")


def _ratio(speeds: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(speeds, others, strict=True))


def _speed(job: Job, run: Run) -> float:
    return len(job.prompts) * job.new_tokens / _cpu_s(partial(run, job))


def _engine(name: str, job: Job, result: Result) -> Callable[[int, Job], Any] | None:
    """None where it is not installed. Also measures what new weights in place take."""
    try:
        engine: Engine = engine_factory(name)(max_batch=BATCH)
    except ModelError:
        return None
    took_s = [_cpu_s(partial(change, job.model_dir)) for change in (engine.load, *[engine.update] * _UPDATES)]
    result.figures |= {f"{name}_load_cpu_s": took_s[0], f"{name}_update_cpu_s": min(took_s[1:])}
    return lambda top_k, job: engine.generate(job.requests, job.sampling(top_k))


def _cpu_s(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _vllm_alone(job: Job) -> Run:
    """vLLM as anyone starts it, with the settings that the engine gives it."""
    import vllm

    from node.engines.vllm_engine import plain_arguments

    llm = vllm.LLM(**plain_arguments(job.model_dir))
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=job.new_tokens, ignore_eos=True, detokenize=False)

    def run(job: Job) -> Any:
        prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in job.prompts]
        return llm.generate(prompts, sampling, use_tqdm=False)

    return run


def _transformers(job: Job) -> Run:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(job.model_dir), dtype=torch.float32)
    settings = {
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

    def run(job: Job) -> Any:
        tokens = torch.tensor(job.prompts)
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
        return model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)

    return run
