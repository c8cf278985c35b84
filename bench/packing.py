"""What packing saves: tokens a CPU-second of forward and backward, packed, in prompt trees, and padded.

Two workloads on the same model: answers whose lengths have a heavy tail, as reasoning has, and groups of short answers
to longer prompts, as few-shot tasks have. Real tokens are counted: those of prompts and answers, never of padding.
`--model smollm2` takes SmolLM2-135M in place of the demo's policy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from bench.harness import Result
from node.run_create import model_directory
from protocol.errors import ConfigError
from trainer.packing import Laid, Pair, lay_out, pad
from trainer.policy import Policy, load_policy
from trainer.recipe import PolicySettings

Way = Callable[[Sequence[Pair]], list[Laid]]


@dataclass(frozen=True)
class Scale:
    """How much of each workload a model gets."""

    heavy_answers: int
    longest: int
    groups: int
    prompt: int
    max_tokens: int
    rounds: int
    """Each way is measured so often, in turn with the others; the best counts, for a busy machine only ever adds."""


SCALES = {
    "demo": Scale(heavy_answers=256, longest=200, groups=32, prompt=40, max_tokens=2048, rounds=3),
    "smollm2": Scale(heavy_answers=16, longest=100, groups=2, prompt=24, max_tokens=256, rounds=1),
}


def heavy_tail(scale: Scale, vocab_size: int, *, seed: int = 0) -> list[Pair]:
    """Answers of Pareto-distributed lengths, none to the same prompt."""
    source = random.Random(2 * seed)
    tokens = partial(source.randrange, 3, vocab_size)
    lengths = [min(scale.longest, int(8 * source.paretovariate(1.1))) for _ in range(scale.heavy_answers)]
    return [([tokens() for _ in range(8)], [tokens() for _ in range(length)]) for length in lengths]


def few_shot(scale: Scale, vocab_size: int, *, seed: int = 0) -> list[Pair]:
    """Groups of eight short answers to one prompt each."""
    source = random.Random(2 * seed + 1)
    tokens = partial(source.randrange, 3, vocab_size)
    prompts = [[tokens() for _ in range(scale.prompt)] for _ in range(scale.groups)]
    return [(prompt, [tokens() for _ in range(source.randint(2, 8))]) for prompt in prompts for _ in range(8)]


def ways(scale: Scale) -> dict[str, Way]:
    """The layouts that are compared, by name."""
    return {
        "padded": partial(_pad_as_they_come, max_tokens=scale.max_tokens),
        "padded_sorted": partial(lay_out, layout="padded", max_tokens=scale.max_tokens),
        "packed": partial(lay_out, layout="packed", max_tokens=scale.max_tokens),
        "shared": partial(lay_out, layout="shared", max_tokens=scale.max_tokens),
    }


def _pad_as_they_come(pairs: Sequence[Pair], *, max_tokens: int) -> list[Laid]:
    longest = max(len(prompt) + len(output) for prompt, output in pairs)
    rows = max(1, max_tokens // longest)
    return [pad(pairs, range(at, min(at + rows, len(pairs)))) for at in range(0, len(pairs), rows)]


def seconds(policy: Policy, way: Way, pairs: Sequence[Pair]) -> float:
    """CPU seconds of one pass over all answers, laying them out included."""
    began = time.process_time()
    for laid in way(pairs):
        policy.score(laid, 1.0, with_entropy=False)[0].sum().backward()  # type: ignore[no-untyped-call]
    policy.model.zero_grad(set_to_none=True)
    return time.process_time() - began


def bench(*, quick: bool, model: str | None = None) -> Result:
    """Both workloads, every way; `quick` takes a few answers and one round."""
    result = measure(model or "demo", quick=quick)
    result.at_least("heavy_tail_packed_over_padded", 1.5)
    result.at_least("few_shot_shared_over_packed", 2.0)
    return result


def measure(name: str, *, quick: bool, seed: int = 0) -> Result:
    """Figures of a model; a seed draws lengths and tokens. Raises ConfigError for a model that is not known."""
    torch.set_num_threads(1)
    if name not in SCALES:
        raise ConfigError(f"the benchmark packing knows no model {name[:80]!r}", hint=f"known: {', '.join(SCALES)}")
    policy = load_policy(_directory(name), settings=PolicySettings(layout="shared"))
    policy.prepare()
    result, scale = Result(), SCALES[name]
    for workload in (heavy_tail, few_shot):
        pairs = workload(scale, policy.vocab_size, seed=seed)
        if quick:
            pairs, scale = pairs[:8], replace(scale, rounds=1)
        _measure(result, policy, workload.__name__, pairs, scale)
    _compare(result)
    return result


def _directory(name: str) -> Path:
    if name == "demo":
        return model_directory("sort-digits")
    from trainer.smollm2 import smollm2_directory

    return smollm2_directory()


def _measure(result: Result, policy: Policy, workload: str, pairs: Sequence[Pair], scale: Scale) -> None:
    compared = ways(scale)
    best = dict.fromkeys(compared, float("inf"))
    seconds(policy, compared["packed"], pairs[:2])  # warms up
    for _ in range(scale.rounds):
        for way, lay in compared.items():
            best[way] = min(best[way], seconds(policy, lay, pairs))
    tokens = sum(len(prompt) + len(output) for prompt, output in pairs)
    table = Table(title=f"{workload}: {len(pairs)} answers, {tokens} tokens", title_justify="left")
    for column in ("way", "micro-batches", "padding", "places a token", "tokens a CPU-second"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, lay in compared.items():
        laid = lay(pairs)
        slots, padding = sum(one.slots for one in laid), sum(one.padding for one in laid)
        result.figures[f"{workload}_{way}_tokens_per_cpu_s"] = tokens / best[way]
        result.figures[f"{workload}_{way}_padding"] = padding / slots
        row = (len(laid), f"{padding / slots:.0%}", f"{slots / tokens:.2f}", f"{tokens / best[way]:,.0f}")
        table.add_row(way, *map(str, row))
    result.tables.append(table)


def _compare(result: Result) -> None:
    def times(workload: str, way: str, other: str) -> float:
        figures = result.figures
        return figures[f"{workload}_{way}_tokens_per_cpu_s"] / figures[f"{workload}_{other}_tokens_per_cpu_s"]

    result.figures["heavy_tail_packed_over_padded"] = times("heavy_tail", "packed", "padded")
    result.figures["heavy_tail_packed_over_padded_sorted"] = times("heavy_tail", "packed", "padded_sorted")
    result.figures["few_shot_shared_over_packed"] = times("few_shot", "shared", "packed")
