"""The paper's claims about its recipe, held against figures of three seeds each (INTELLECT-2, sections 3 and 4).

Rollouts, batches and training steps are the nodes' own code, run in this process without a network. Whether a claim is
reproduced is computed from the figures and their 95 % intervals over seeds (bench.seeds).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import torch

from bench import paper_asynchrony, paper_clipping, paper_filters, paper_lengths, paper_packing
from bench.harness import Result
from bench.report import Section
from protocol.errors import ConfigError

SEEDS: Final = 3


class Part(Protocol):
    """Runs one part with some seeds; `report` is told what has been found so far."""

    def __call__(self, seeds: Sequence[int], *, quick: bool, report: Callable[[str], None]) -> Section: ...


PARTS: Final[dict[str, Part]] = {
    "asynchrony": paper_asynchrony.run,
    "clipping": paper_clipping.run,
    "filters": paper_filters.run,
    "lengths": paper_lengths.run,
    "packing": paper_packing.run,
}


def bench(*, quick: bool, only: str | None = None, seeds: int | None = None) -> Result:
    """All parts or one, three seeds unless told otherwise; `quick` takes one seed, a few steps and no verdicts."""
    if only is not None and only not in PARTS:
        raise ConfigError(f"the benchmark paper has no part {only[:80]!r}", hint=f"known: {', '.join(PARTS)}")
    torch.set_num_threads(1)
    chosen = range(1 if quick else seeds or SEEDS)
    result = Result()
    for name in [only] if only else PARTS:
        began = time.process_time()
        section = PARTS[name](chosen, quick=quick, report=partial(_say, name))
        spent = time.process_time() - began
        section.setting += f" {spent:.0f} CPU-seconds."
        result.sections.append(section)
        result.figures |= {f"{name}_{figure}": value for figure, value in section.figures.items()}
        result.figures[f"{name}_cpu_s"] = spent
    return result


def _say(part: str, line: str) -> None:
    sys.stderr.write(f"{part}: {line}\n")
