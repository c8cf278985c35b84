"""Which reasoning-gym tasks may be used: `python -m environments.reasoning_gym_survey > environments/assets/…json`.

A task is taken if two processes with different hash seeds draw the same and score the same, if its own right answer is
right and a wrong one is not, and if it is quick. If its scorer runs what a policy wrote, as found in its code (a call
that leads from `score_answer` to eval and its like) or seen happening to a marked answer, it must be one of BOXED,
which somebody has read. Run it again for another release of the package.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import FrameType
from typing import Any, Final

ITEMS: Final = 8
MAX_ITEM_S: Final = 0.25
"""CPU-seconds for drawing and scoring one item, on average."""
_TASK_S: Final = 60
_MARK: Final = "zq7mark"
_RUNNERS: Final = frozenset(
    {"eval", "exec", "compile", "parse_expr", "sympify", "S", "simplify", "system", "popen", "run", "Popen"}
)
_HASH_SEEDS: Final = ("1", "2")
BOXED: Final = {
    "binary_matrix": "rows",
    "bitwise_arithmetic": "rows",
    "countdown": "formula",
    "n_queens": "rows",
    "number_sorting": "rows",
    "polynomial_multiplication": "formula",
    "puzzle24": "formula",
    "simple_integration": "formula",
    "spiral_matrix": "rows",
    "string_insertion": "rows",
}
"""Scorers that run text, or whose code looks like it, and the form of text (environments.reasoning_gym_boxed) with
which they do no harm and tell no lie.

Not intermediate_integration: its answers may be the question, in sympy's words."""


def main() -> None:
    """Survey every registered task, or with --task look at one in this process."""
    parser = argparse.ArgumentParser(prog="python -m environments.reasoning_gym_survey")
    parser.add_argument("--task", help="look at this task only, in this process")
    options = parser.parse_args()
    if options.task:
        sys.stdout.write(json.dumps(look_at(options.task)))
        return
    from reasoning_gym.factory import DATASETS

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        names = sorted(DATASETS)
        found = dict(zip(names, executor.map(judge, names), strict=True))
    survey = {
        "reasoning-gym": metadata.version("reasoning-gym"),
        "allowed": [name for name, why in found.items() if not why and name not in BOXED],
        "boxed": {name: form for name, form in BOXED.items() if not found[name]},
        "excluded": {name: why for name, why in found.items() if why},
    }
    sys.stdout.write(json.dumps(survey, indent=1) + "\n")


def judge(task: str) -> str:
    """Why a task may not be used; empty if it may."""
    looks = [_look_in_a_process(task, hash_seed) for hash_seed in _HASH_SEEDS]
    for look in looks:
        if look.get("fault"):
            return str(look["fault"])
    if looks[0]["items"] != looks[1]["items"]:
        return "draws or scores otherwise under another hash seed"
    return ""


def _look_in_a_process(task: str, hash_seed: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "environments.reasoning_gym_survey", "--task", task]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=10 * _TASK_S,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {"fault": "takes too long, or crashes"}
    return found


def look_at(task: str) -> dict[str, Any]:
    """Items of a task with their scores, or a fault."""
    from reasoning_gym.factory import DATASETS, create_dataset

    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, _TASK_S)
    if (runner := runs_text(DATASETS[task][0])) and task not in BOXED:
        return {"fault": f"its scorer may run what a policy wrote: {runner}"}
    watch = Watch()
    try:
        started = time.process_time()
        items = [_item(create_dataset, task, seed, watch) for seed in range(ITEMS)]
        spent = (time.process_time() - started) / ITEMS
        again = [_item(create_dataset, task, seed, watch) for seed in range(ITEMS)]
    except Exception as error:  # whatever a task raises, it is not for us
        return {"fault": f"fails with its default settings: {type(error).__name__}"}
    if again != items:
        return {"fault": "draws or scores otherwise the second time"}
    if watch.seen and task not in BOXED:
        return {"fault": "its scorer compiles what a policy wrote"}
    if not all(item["own"] >= 0.99 for item in items):
        return {"fault": "its own answer is not scored as right"}
    if any(score >= 0.99 for item in items for score in item["wrong"]):
        return {"fault": "a wrong answer is scored as right"}
    if spent > MAX_ITEM_S:
        return {"fault": f"slow: more than {MAX_ITEM_S} CPU-s an item"}
    return {"items": items}


def _item(create_dataset: Callable[..., Any], task: str, seed: int, watch: Watch) -> dict[str, Any]:
    dataset = create_dataset(task, size=1, seed=seed)
    entry = dataset[0]
    own = str(entry["answer"])
    wrong = ["", "no idea", "-987654321.5"]
    marked = [_MARK, f"[{_MARK}]", f"[[{_MARK}]]", f"{_MARK} = 1", f"x + {_MARK}", f"{own} {_MARK}", f"{own}+{_MARK}"]
    with watch:
        scores = [_score(dataset, text, entry) for text in (own, *wrong, *marked)]
    return {"question": str(entry["question"]), "answer": own, "own": scores[0], "wrong": scores[1 : len(wrong) + 1]}


def _score(dataset: Any, text: str, entry: Any) -> float:
    try:
        return float(dataset.score_answer(text, entry))
    except Exception:  # counts as wrong where the environment scores, too
        return 0.0


class Watch:
    """Sees whether marked text is compiled, but for literals, which run nothing."""

    def __init__(self) -> None:
        self.seen = False
        self._on = False
        sys.addaudithook(self._hook)

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._on and event == "compile" and _MARK in str(arguments[0]):
            self.seen = self.seen or not _within_literal_eval(sys._getframe())


def _within_literal_eval(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "literal_eval":
            return True
        frame = frame.f_back
    return False


def runs_text(kind: type) -> str:
    """A call to eval or its like that `score_answer` leads to within its class and module; empty if there is none."""
    module = inspect.getmodule(kind)
    waiting, known = ["score_answer"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        source = _source(getattr(kind, name, None)) or _source(getattr(module, name, None))
        called = _calls(source)
        if bad := sorted(called & _RUNNERS):
            return f"{name} calls {bad[0]}"
        waiting += called
    return ""


def _source(function: Any) -> str:
    if not inspect.isfunction(function) or not function.__module__.startswith("reasoning_gym"):
        return ""
    return textwrap.dedent(inspect.getsource(function))


def _calls(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in calls
        if isinstance(each, (ast.Name, ast.Attribute))
    }


def _too_long(number: int, frame: FrameType | None) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    raise TimeoutError(f"{used.ru_utime:.0f} CPU-s")


if __name__ == "__main__":
    main()
