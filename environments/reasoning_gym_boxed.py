"""Scorers of reasoning-gym that evaluate what a policy wrote: run in boxes of the sandbox, on text of a known form.

Such a scorer's verdict comes out of the interpreter that evaluates the text, so two things are needed. The box keeps
what is evaluated from the node; the form keeps it from the verdict: no calls but those of a few functions, no
attributes, and no names by which full marks could be had. Text of another form earns nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from environments.allowance import Allowance
from environments.sandbox.box import Ended
from environments.sandbox.inside import values
from environments.sandbox.launch import BoxSpec
from environments.sandbox.limits import Limits
from environments.sandbox.pool import SandboxPool
from environments.sandbox.status import establish
from environments.worker_pool import CouldNotTellError, FailedError
from protocol.errors import BoxError, EnvironmentUnknown

FORMS: Final[Mapping[str, re.Pattern[str]]] = {
    "formula": re.compile(
        r"(?:\s*(?:[0-9]{1,40}(?:\.[0-9]{0,40})?(?![0-9.])|(?<![0-9A-Za-z])"
        r"(?:[a-zCX]|a?(?:sin|cos|tan|sinh|cosh|tanh)|exp|log|sqrt|pi)(?![0-9A-Za-z])|[-+*/()]))*\s*"
    ),
    "rows": re.compile(r"(?:[A-Za-z0-9_ ,\n\[\]'\"-]|(?<=[0-9])\.(?=[0-9]))*"),
}
"""`formula` is for sympy's parser; of `rows` the scorers pay in full only what is right letter by letter."""
MAX_CHARS: Final = 400
PACKAGE: Final = "reasoning_gym"
LIMITS: Final = Limits(
    cpu_s=3.0, cpu_end_s=6, memory_bytes=1 << 30, address_space_bytes=3 << 30, wall_s=30.0, output_bytes=1 << 16
)
_SCORER: Final = """
from reasoning_gym.factory import create_dataset

def score(task, config, seed, text):
    dataset = create_dataset(task, size=1, seed=seed, **config)
    return float(dataset.score_answer(text, dataset[0]))
"""


class BoxedScorer:
    """Scores answers to one task with its settings. None of its boxes is started before the first answer."""

    def __init__(self, task: str, config: Mapping[str, Any], *, form: str) -> None:
        self._task = task
        self._config = dict(config)
        self._form = FORMS[form]
        self._pool: SandboxPool | None = None

    def scores(self, answers: Sequence[tuple[int, str]], *, allowance: Allowance | None) -> list[Any]:
        """The score of each (seed, text), or the error in its place, as environments.worker_pool gives them."""
        return self.pool.map(partial(self._score, allowance=allowance), answers)

    def require_machine(self) -> None:
        """Raises SandboxError where no box works, EnvironmentUnknown where the package is missing."""
        establish(self.pool.spec)

    def close(self) -> None:
        """End the boxes."""
        if self._pool is not None:
            self._pool.close()

    @property
    def pool(self) -> SandboxPool:
        """Boxes that hold the package, each used for many answers: to import it takes a second."""
        if self._pool is None:
            spec = BoxSpec(
                import_paths=(str(_packages()),),
                preload=(f"{PACKAGE}.factory",),
                limits=LIMITS,
                jobs_share_box=True,
            )
            self._pool = SandboxPool(spec)
        return self._pool

    def _score(self, answer: tuple[int, str], allowance: Allowance | None) -> Any:
        seed, text = answer
        if len(text) > MAX_CHARS or not self._form.fullmatch(text):
            return FailedError("not of the form that is evaluated")
        if allowance is not None and allowance.used_up:
            return CouldNotTellError(allowance.used_up)
        try:
            with self.pool.box() as box:
                outcome = box.call(_SCORER, "score", [self._task, self._config, seed, text])
        except BoxError as error:
            return CouldNotTellError(f"the sandbox: {error.message[:200]}")
        if allowance is not None:
            allowance.charge(outcome.cpu_s)
        if outcome.ended is not Ended.WELL or not outcome.within(LIMITS):
            return CouldNotTellError(f"the scorer {outcome.ended.value} {outcome.detail}".strip())
        try:
            return values.parse(outcome.result)
        except ValueError:
            return CouldNotTellError("the scorer gave no number")


def _packages() -> Path:
    """Where the package lies, with what it needs. Raises EnvironmentUnknown."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise EnvironmentUnknown(
            "the environment reasoning-gym needs the package reasoning-gym, which is not installed here",
            hint="pip install 'intellect-node[reasoning-gym]'",
        )
    return Path(found.origin).parents[1]
