"""A worker that compares two formulas with math-verify: `python -P -m environments.maths_worker`.

math-verify's own time-outs are alarms that fail off the main thread and say "wrong" when they strike; they are off, and
the worker's limits take their place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from environments.worker_loop import serve

MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 2.0


def _with_imaginary_unit(gold: Sequence[Any], answer: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Both with `i` for the root of -1, which the parser takes for a name; None unless only one of them has it."""
    from sympy import Basic, I

    def names(formula: Any) -> list[Any]:
        return [each for each in formula.free_symbols if each.name == "i"] if isinstance(formula, Basic) else []

    def is_imaginary(formulas: Sequence[Any]) -> bool:
        return any(isinstance(each, Basic) and not names(each) and each.doit().has(I) for each in formulas)

    def with_unit(formulas: Sequence[Any]) -> list[Any]:
        return [each.subs(dict.fromkeys(names(each), I)) if names(each) else each for each in formulas]

    if is_imaginary(gold) == is_imaginary(answer):
        return None
    return with_unit(gold), with_unit(answer)


def prepare() -> Callable[[Any], Any]:
    """Import math-verify; requests are [gold, answer], or [gold] to ask whether it can be read at all."""
    from math_verify import LatexExtractionConfig, parse, parser, verify

    logging.disable(logging.CRITICAL)
    swallowed: list[BaseException] = []
    inner = parser.latex2sympy

    def watched(*arguments: Any, **options: Any) -> Any:
        try:
            return inner(*arguments, **options)
        except (MemoryError, RecursionError) as error:  # the parser takes these for a formula that is not well formed
            swallowed.append(error)
            raise

    parser.latex2sympy = watched
    config = [LatexExtractionConfig()]

    def read(formula: str) -> Any:
        boxed = f"\\boxed{{{formula}}}"
        swallowed.clear()
        found = parse(boxed, config, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
        if swallowed:
            raise swallowed[0]
        return found

    def compare(request: Any) -> Any:
        gold = read(request[0])
        if not gold:
            return "gold"
        if len(request) == 1:
            return "read"
        answer = read(request[1])
        if not answer:
            return False
        if verify(gold, answer, timeout_seconds=None, raise_on_error=True):
            return True
        pair = _with_imaginary_unit(gold, answer)
        return pair is not None and bool(verify(*pair, timeout_seconds=None, raise_on_error=True))

    compare(["\\frac{1}{2}", "0.5"])  # loads the grammar before the first limit counts
    return compare


if __name__ == "__main__":
    serve(prepare, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
