"""TOPLOC against the public `toploc` package: proofs built and verified per CPU-second, on chunks of 32 tokens.

Both through their Python interfaces, one thread, over many different chunks. The public package's wheel does not load
with this torch, so it is built from its source once, into the user's cache directory; that takes minutes. Where that
fails its rows are left out.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness import Result
from protocol import toploc, toploc_numpy
from protocol.constants import PROOF_CHUNK_TOKENS

WIDTHS: Final = (896, 2048, 5120)
TOP_K: Final = 128
CHUNKS: Final = 64
REPEATS: Final = 7
LEAST_RATIO: Final = 10.0
PUBLIC_VERSION: Final = "0.1.6"


@dataclass(frozen=True)
class Contender:
    """One implementation on one set of states."""

    build: Callable[[], list[bytes]]
    verify: Callable[[list[bytes]], list[Any]]


def bench(*, quick: bool) -> Result:
    """All widths; `quick` takes one, few chunks, and the public package only where it is built already."""
    torch.set_num_threads(1)
    public = public_package(build=not quick)
    result = Result()
    for width in WIDTHS[:1] if quick else WIDTHS:
        contenders, mismatches = _contenders(width, chunks=4 if quick else CHUNKS, public=public)
        costs = _interleaved(contenders, repeats=1 if quick else REPEATS)
        result.figures |= {f"h{width}_{name}_us": cost * 1e6 for name, cost in costs.items()}
        if public is None:
            continue
        result.figures[f"h{width}_public_mismatches"] = mismatches
        result.at_most(f"h{width}_public_mismatches", 8)  # of 128; the two break ties differently
        for what in ("build", "verify"):
            result.figures[f"h{width}_{what}_ratio"] = costs[f"public_{what}"] / costs[f"own_{what}"]
            if not quick:
                result.at_least(f"h{width}_{what}_ratio", LEAST_RATIO)
    result.figures["native"] = float(toploc.backend() == "native")
    return result


def _contenders(width: int, *, chunks: int, public: Any) -> tuple[dict[str, Contender], int]:
    """Implementations by name, and the most exponent mismatches with which own and public proofs verify crosswise."""
    patterns = hidden_states(width, tokens=chunks * PROOF_CHUNK_TOKENS)
    found = {"own": own(patterns), "numpy": by_numpy(patterns)}
    if public is None:
        return found, 0
    found["public"] = by_public(public, patterns)
    theirs = toploc.verify_proofs(patterns, found["public"].build(), TOP_K)
    ours = found["public"].verify(found["own"].build())
    return found, max(max(each.exponent_mismatches for each in theirs), max(int(each.exp_mismatches) for each in ours))


def hidden_states(width: int, *, tokens: int) -> NDArray[np.uint16]:
    """States with strong dimensions and strong tokens, as trained models have."""
    rng = np.random.default_rng(width)
    scales = rng.lognormal(0, 1, width).astype(np.float32)
    states = rng.standard_normal((tokens, width), np.float32) * scales
    return toploc.bf16_patterns(states)


def own(patterns: NDArray[np.uint16]) -> Contender:
    return Contender(
        lambda: toploc.build_proofs(patterns, TOP_K), lambda proofs: toploc.verify_proofs(patterns, proofs, TOP_K)
    )


def by_numpy(patterns: NDArray[np.uint16]) -> Contender:
    """The arithmetic that is used where there was no compiler."""
    chunks = patterns.reshape(len(patterns) // PROOF_CHUNK_TOKENS, -1)
    return Contender(
        lambda: [toploc_numpy.build(chunks, TOP_K)],
        lambda proofs: toploc_numpy.verify(chunks, b"".join(proofs), TOP_K),
    )


def by_public(package: Any, patterns: NDArray[np.uint16]) -> Contender:
    """Its list of token states to build from, and the one tensor with which its compiled verifier is used."""
    states = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    tokens = list(states)
    return Contender(
        lambda: package.build_proofs_bytes(tokens, PROOF_CHUNK_TOKENS, TOP_K, skip_prefill=True),
        lambda proofs: package.verify_proofs_bytes(states, proofs, PROOF_CHUNK_TOKENS, TOP_K, skip_prefill=True),
    )


def _interleaved(contenders: Mapping[str, Contender], *, repeats: int) -> dict[str, float]:
    """CPU seconds a chunk of `<name>_build` and `<name>_verify`: the least of some rounds in which all take turns."""
    costs: dict[str, float] = {}
    for _ in range(repeats + 1):  # the first round's are never the least
        for name, contender in contenders.items():
            build_s, proofs = _cpu_s(contender.build)
            verify_s, results = _cpu_s(partial(contender.verify, proofs))
            for what, spent_s in (("build", build_s), ("verify", verify_s)):
                key = f"{name}_{what}"
                costs[key] = min(costs.get(key, spent_s), spent_s / len(results))
    return costs


def _cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    done = work()
    return time.process_time() - began, done


def public_package(*, build: bool) -> Any:
    """The public package, built first if it must and may be; else None, with a line that says why."""
    directory = cache_directory()
    if not directory.exists():
        fault = _build_public(directory) if build else "not built yet; a run without --quick does it"
        if fault:
            return _without_public(fault)
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module("toploc")
    except (ImportError, OSError) as error:
        return _without_public(f"{directory} does not load: {error}")
    finally:
        sys.path.remove(str(directory))


def cache_directory() -> Path:
    """Where the public package lies, one directory for each torch and Python."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"toploc-{PUBLIC_VERSION}-torch-{torch.__version__}-{sys.implementation.cache_tag}"
    return caches / "intellect-node" / "bench" / name


def _build_public(directory: Path) -> str:
    """What went wrong, or nothing. The directory appears when it is whole."""
    sys.stderr.write(f"building toploc {PUBLIC_VERSION} from its source into {directory}; this takes minutes, once\n")
    partial = directory.with_name(directory.name + ".partial")
    options = ("--no-binary", "toploc", "--no-build-isolation", "--no-deps", "--quiet", "--target", str(partial))
    command = (sys.executable, "-m", "pip", "install", *options, f"toploc=={PUBLIC_VERSION}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1][:300]
    partial.rename(directory)
    return ""


def _without_public(reason: str) -> None:
    sys.stderr.write(f"the public toploc package is left out: {reason}\n")
