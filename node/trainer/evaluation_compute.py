"""The trainer's evaluation process: measures published policies on held-out prompts while the next step trains.

`python -m node.trainer.evaluation_compute`. A process of its own, at low priority, so that training never waits for it.
The trainer does it, and no validator, because nobody has to believe these figures: they decide nothing.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from node.compute.serve import serve
from node.engines.base import Engine
from node.engines.registry import engine_from_environment
from node.engines.tokenizer import Tokenizer
from node.evaluation import evaluate, run_sampling, run_work
from protocol.records import Manifest
from protocol.seeds import evaluation_seed
from trainer.recipe import EvaluationSettings

NICENESS: Final = 10

_log = logging.getLogger(__name__)


class EvaluationWorker:
    """Evaluates one policy a call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def evaluate(self, policy_dir: str, run_id: bytes, manifest: bytes, settings: dict[str, Any]) -> dict[str, Any]:
        """Results of one policy; `manifest` is the record, as msgpack. Raises ModelError or EnvironmentUnknown."""
        began = time.monotonic()
        run = msgspec.msgpack.decode(manifest, type=Manifest)
        how = msgspec.convert(settings, EvaluationSettings)
        tokenizer = Tokenizer(Path(policy_dir))
        self._engine.load(Path(policy_dir))
        work = run_work(run, tokenizer, how, seed=evaluation_seed(run_id))
        found = evaluate(
            self._engine,
            tokenizer,
            work,
            run_sampling(run, how),
            max_model_len=run.model.max_model_len,
            pass_at=how.pass_at,
        )
        seconds = time.monotonic() - began
        _log.info("evaluated policy=%s pass=%.3f seconds=%.1f", policy_dir, found.pass_at[0].value, seconds)
        return {**msgspec.to_builtins(found), "seconds": seconds}


def main() -> None:
    """Entry point of the process that the trainer's node starts."""
    os.nice(NICENESS)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    serve({"evaluate": EvaluationWorker(engine_from_environment()).evaluate})


if __name__ == "__main__":
    main()
