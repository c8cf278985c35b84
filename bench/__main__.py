"""`python -m bench` lists the benchmarks; `python -m bench NAME [--quick]` runs one. Exit 1 when a goal is missed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from bench.harness import benchmark_names, load_benchmark, show
from protocol.errors import NodeError


def main(arguments: Sequence[str] | None = None) -> int:
    """List, or run one benchmark; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what the documentation quotes.")
    parser.add_argument("name", nargs="?", help="Which benchmark; without it they are listed.")
    parser.add_argument("--quick", action="store_true", help="Less of everything: does it run, not how fast.")
    parser.add_argument("--model", default=None, help="For those that know several: another model than the demo's.")
    options = parser.parse_args(arguments)
    console = Console()
    if options.name is None:
        for name, what in benchmark_names().items():
            console.print(f"{name:12} {what}", markup=False, highlight=False, soft_wrap=True)
        return 0
    try:
        bench = load_benchmark(options.name, model=options.model)
        result = bench(quick=options.quick)
    except NodeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    show(options.name, result, console)
    return 0 if result.met else 1


if __name__ == "__main__":
    sys.exit(main())
