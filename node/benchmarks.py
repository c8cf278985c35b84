"""`intellect-node eval --tasks`: the field's benchmarks on any policy, through lm-eval in a process of its own.

Which tasks a paper's table has, and where their data comes from, is in trainer/recipes/benchmarks. Nothing is fetched
from the network unless asked for: a benchmark whose data is not here is named, with the command that gets it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from node.logs import printable
from protocol.errors import ConfigError, ModelError, NodeError
from trainer.recipe import RECIPES_DIR

BENCHMARKS_DIR: Final = RECIPES_DIR / "benchmarks"
_TASK: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_Z: Final = 1.959964
_TAIL_CHARS: Final = 600

Text = Annotated[str, Meta(max_length=1000)]


class Benchmark(Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a table."""

    name: Text
    task: Text
    """lm-eval's name of it; empty where lm-eval has none."""
    data: Text
    """Data set on Hugging Face."""
    get: Text
    """The command that fetches the data."""
    note: Text = ""


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    benchmark: list[Benchmark]


class Score(Struct, frozen=True):
    """One metric of one task, with the ends of its 95 % interval where lm-eval gives a standard error."""

    task: str
    metric: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Harness:
    """How lm-eval is called."""

    model: Path
    backend: str = "hf"
    """lm-eval's name for what generates: `hf` or `vllm`."""
    device: str = "cpu"
    dtype: str = "auto"
    batch_size: str = "auto"
    limit: int | None = None
    """Only so many examples of each task."""
    chat: bool = False
    """Ask through the model's chat template."""
    task_dir: Path | None = None
    """Directory with tasks of one's own, in lm-eval's YAML."""
    download: bool = False
    """Whether lm-eval may fetch data from the network."""
    timeout_s: float = 7 * 86400.0


def table_names() -> list[str]:
    """Names of the shipped tables."""
    return sorted(path.stem for path in BENCHMARKS_DIR.glob("*.toml"))


def load_table(name: str) -> list[Benchmark]:
    """The benchmarks of a shipped table. Raises ConfigError."""
    if name not in table_names():
        raise ConfigError(f"there is no table {name!r}; shipped are: {', '.join(table_names())}")
    data = tomllib.loads((BENCHMARKS_DIR / f"{name}.toml").read_text(encoding="utf-8"))
    return msgspec.convert(data, _Table).benchmark


def data_is_here(dataset: str, environ: Mapping[str, str]) -> bool:
    """Whether Hugging Face's cache on this computer holds a data set."""
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    return any((cache / f"datasets--{dataset.replace('/', '--')}" / "snapshots").glob("*/*"))


def split_table(benchmarks: Sequence[Benchmark], environ: Mapping[str, str]) -> tuple[list[Benchmark], list[Benchmark]]:
    """Those that can be run here without a network, and those that cannot."""
    here = [one for one in benchmarks if one.task and data_is_here(one.data, environ)]
    return here, [one for one in benchmarks if one not in here]


def lacking_lines(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    """What people read of benchmarks that cannot be run here."""
    for one in benchmarks:
        why = f"its data, {one.data}, is not on this computer" if one.task else "lm-eval has no such task"
        yield f"{one.name}: not run: {why}"
        yield f"  get it: {one.get}"
        if one.note:
            yield f"  note: {one.note}"


def run_tasks(tasks: Sequence[str], harness: Harness) -> list[Score]:
    """Run lm-eval on tasks, by its names. Raises ConfigError for what it does not know, NodeError where it fails."""
    _require_lm_eval()
    bad = [task for task in tasks if not _TASK.fullmatch(task)]
    if bad or not tasks:
        raise ConfigError(f"no name of a task: {bad[0][:80]!r}" if bad else "no task is named", hint="see --tasks list")
    if not (harness.model / "config.json").is_file():
        raise ModelError(f"{harness.model} is no model directory: it has no config.json")
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as out:
        ended = _call([*_command(tasks, harness), "--output_path", out], harness)
        results = sorted(Path(out).rglob("results_*.json"))
        if ended.returncode or not results:
            raise _failure(tasks, ended)
        return list(_scores(json.loads(results[-1].read_bytes())))


def list_tasks() -> str:
    """The tasks that the installed lm-eval knows, as it prints them. Raises ConfigError, NodeError."""
    _require_lm_eval()
    ended = subprocess.run(
        [sys.executable, "-m", "lm_eval", "ls", "tasks"], capture_output=True, text=True, timeout=600, check=False
    )
    if ended.returncode:
        raise NodeError(f"lm-eval cannot list its tasks: {ended.stderr.strip()[-_TAIL_CHARS:]}")
    return ended.stdout


def _require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "benchmarks are run by lm-eval, which is not installed here",
            hint="pip install 'intellect-node[eval]'; --environment NAME needs nothing more",
        )


def _command(tasks: Sequence[str], harness: Harness) -> list[str]:
    arguments = f"pretrained={harness.model.absolute()},dtype={harness.dtype},trust_remote_code=False"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", harness.backend, "--model_args", arguments]
    command += ["--tasks", ",".join(tasks), "--device", harness.device, "--batch_size", harness.batch_size]
    if harness.limit is not None:
        command += ["--limit", str(harness.limit)]
    if harness.task_dir is not None:
        command += ["--include_path", str(harness.task_dir.absolute())]
    return [*command, "--apply_chat_template"] if harness.chat else command


def _call(command: Sequence[str], harness: Harness) -> subprocess.CompletedProcess[str]:
    offline = {} if harness.download else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=harness.timeout_s,
            check=False,
            env={**os.environ, **offline},
        )
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"lm-eval did not finish within {harness.timeout_s:g} s", hint="try --limit") from error


def _failure(tasks: Sequence[str], ended: subprocess.CompletedProcess[str]) -> NodeError:
    text = printable((ended.stderr + ended.stdout).strip())
    lowered = text.lower()
    if "tasks not found" in lowered or "tasks were not found" in lowered or "no tasks specified" in lowered:
        return ConfigError(
            f"lm-eval does not know all of these tasks: {', '.join(tasks)}",
            hint="`intellect-node eval --tasks list` shows those it knows; --task-dir adds your own",
        )
    if "offline" in lowered or "couldn't reach" in lowered or "couldn't find cache" in lowered:
        return ConfigError(
            f"the data of {', '.join(tasks)} is not on this computer: {text[-200:]}",
            hint="fetch it first (hf download --repo-type dataset ID), or let lm-eval do so with --download",
        )
    return NodeError(f"lm-eval failed (exit code {ended.returncode}): {text[-_TAIL_CHARS:]}")


def _scores(results: Mapping[str, Any]) -> Iterator[Score]:
    for task, metrics in sorted(results.get("results", {}).items()):
        for key, value in sorted(metrics.items()):
            metric, _, variant = key.partition(",")
            if not isinstance(value, int | float) or isinstance(value, bool) or metric.endswith("_stderr"):
                continue
            if not variant:
                continue  # sample counts and the like: metrics name the filter that made them
            error = metrics.get(f"{metric}_stderr,{variant}")
            bounds = _bounds(value, error) if isinstance(error, int | float) else (None, None)
            yield Score(task, metric if variant == "none" else f"{metric} ({variant})", value, *bounds)


def _bounds(value: float, error: float) -> tuple[float, float]:
    """Ends of the 95 % interval; shares stay between 0 and 1."""
    low, high = value - _Z * error, value + _Z * error
    return (max(0.0, low), min(1.0, high)) if 0 <= value <= 1 else (low, high)
