"""What an open dashboard costs a node: CPU for each look at it, in a run of many steps and submissions.

A ledger's state is filled in directly; what is measured is making the sections that have changed, which happens once a
second at most, and only while a page is open.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.harness import Result
from node.dashboard.sections import Sections
from node.dashboard.sources import Sources
from node.run_create import create_run
from node.status import StatusBoard
from protocol.identity import Identity
from protocol.ledger import LedgerState, LedgerSubmission
from protocol.records import Submission, Trained

STEPS, QUICK_STEPS = 10_000, 200
SUBMISSIONS_A_STEP = 5
TIMES = 5


def bench(*, quick: bool) -> Result:
    """Look when nothing is new, when the ledger has grown by an entry, and when a step was trained."""
    steps = QUICK_STEPS if quick else STEPS
    state, sections = filled(steps)
    sections.refresh()
    idle = _cpu_ms(lambda: _all_of(sections.refresh, []))
    entry = _cpu_ms(lambda: _grown(state, sections))
    trained = _cpu_ms(lambda: _trained(state, sections))
    result = Result(
        {
            "steps": float(steps),
            "submissions": float(len(state.submissions)),
            "nothing_new_ms": idle,
            "new_entry_ms": entry,
            "new_step_ms": trained,
            "first_page_bytes": float(len(sections.steps(0)[0])),
        }
    )
    result.at_most("nothing_new_ms", 2)
    result.at_most("new_entry_ms", 50)
    result.at_most("first_page_bytes", 2e6)
    return result


def filled(steps: int) -> tuple[LedgerState, Sections]:
    """A state of so many trained steps, and the sections that show it."""
    operator = Identity.from_phrase("bench dashboard")
    with tempfile.TemporaryDirectory() as directory:
        made = create_run("demo", Path(directory), identity=operator, validators=[operator.peer_id], issued_at_ms=1)
    state = LedgerState(made.manifest.id, made.manifest.record)
    for step in range(steps):
        state.trained[step] = _step(state, step)
    for number in range(steps * SUBMISSIONS_A_STEP):
        one = LedgerSubmission(_submission(state, number), operator.peer_id, state="accepted")
        state.submissions[number.to_bytes(32, "big")] = one
    sources = Sources(made.address)
    sources.ledger = lambda: state
    return state, Sections(StatusBoard(role="watch", peer_id=operator.peer_id, run=str(made.address)), sources)


def _step(state: LedgerState, step: int) -> Trained:
    names = ("tokens", "rollouts", "loss", "kl", "entropy", "grad_norm", "staleness", "staleness_max")
    return Trained(
        run_id=state.run_id,
        step=step,
        checkpoint=bytes(32),
        mean_reward=(step % 997) / 997,
        metrics=dict.fromkeys((*names, "train_seconds", "wait_seconds"), 1 / 3),
        issued_at_ms=1000 * step,
    )


def _submission(state: LedgerState, number: int) -> Submission:
    return Submission(
        run_id=state.run_id, step=number // SUBMISSIONS_A_STEP, index=number % SUBMISSIONS_A_STEP, checkpoint_step=0,
        checkpoint=bytes(32), sha256=bytes(32), size=1000, rollouts=32, output_tokens=300, prompts=bytes(32),
        engine="torch", dtype="float32", software="bench", issued_at_ms=1,
    )  # fmt: skip


def _grown(state: LedgerState, sections: Sections) -> None:
    state.length += 1
    sections.refresh()


def _trained(state: LedgerState, sections: Sections) -> None:
    state.trained[len(state.trained)] = _step(state, len(state.trained))
    _grown(state, sections)


def _all_of(refresh: Callable[[], list[str]], expected: list[str]) -> None:
    if refresh() != expected:
        raise RuntimeError("something changed while nothing did")


def _cpu_ms(function: Callable[[], None]) -> float:
    """The least of several times: others share the cores."""
    spent = []
    for _ in range(TIMES):
        began = time.process_time()
        function()
        spent.append(1000 * (time.process_time() - began))
    return round(min(spent), 3)
