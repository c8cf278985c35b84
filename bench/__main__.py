"""`python -m bench` lists the benchmarks; `python -m bench NAME [--quick]` runs one. Exit 1 when a goal is missed."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from bench.harness import PIPED_WIDTH, Result, as_json, benchmark_names, load_benchmark, show
from bench.report import write_sections
from protocol.atomic import write_atomically
from protocol.errors import NodeError


def main(arguments: Sequence[str] | None = None) -> int:
    """List, or run one benchmark; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what the documentation quotes.")
    parser.add_argument("name", nargs="?", help="Which benchmark; without it they are listed.")
    parser.add_argument("--quick", action="store_true", help="Less of everything: does it run, not how fast.")
    parser.add_argument("--model", default=None, help="For those that know several: another model than the demo's.")
    parser.add_argument("--only", default=None, help="For those of several parts: one of them.")
    parser.add_argument("--seeds", type=_at_least_one, default=None, help="For those that count seeds: how many.")
    parser.add_argument("--trl-python", type=Path, default=None, help="For trainer: the interpreter that has TRL.")
    parser.add_argument("--json", type=Path, default=None, help="Write the line of JSON to this file too.")
    parser.add_argument("--write", type=Path, default=None, help="Put tables and statements into this Markdown file.")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if options.name is None:
        for name, what in benchmark_names().items():
            console.print(f"{name:12} {what}", markup=False, highlight=False, soft_wrap=True)
        return 0
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        bench = load_benchmark(
            options.name,
            model=options.model,
            only=options.only,
            seeds=options.seeds,
            trl_python=options.trl_python,
        )
        result = bench(quick=options.quick)
        _keep(options, result)
    except NodeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
    show(options.name, result, console)
    return 0 if result.met else 1


def _leave(number: int, _: object) -> NoReturn:
    """As an exception, so that what a benchmark has begun is put away: its temporary directory, its processes."""
    sys.exit(128 + number)


def _at_least_one(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is too few: 1 or more")
    return count


def _keep(options: argparse.Namespace, result: Result) -> None:
    if options.json is not None:
        write_atomically(options.json, f"{as_json(options.name, result)}\n".encode())
    if options.write is not None:
        given = f" --seeds {options.seeds}" if options.seeds else ""
        today = f"{datetime.date.today():%Y-%m-%d}"
        write_sections(options.write, result.sections, bench=options.name, options=given, date=today)


if __name__ == "__main__":
    sys.exit(main())
