"""What runs inside each of vLLM's workers: methods that vLLM mixes into its worker class and calls by their names.

One worker draws and records; where several share a policy (tensor parallelism), all draw the same tokens and the first
one records. Also computes finished sequences: their states are taken as the passes give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.vllm_answers import Answers, Job, Taken
from node.engines.vllm_private import Runner, Step

EXTENSION: Final = "node.engines.vllm_worker.AnsweringWorker"
"""For vLLM's `worker_extension_cls`."""


@dataclass(frozen=True)
class Wanted:
    """States to keep: `count` rows of a sequence from position `first` on."""

    first: int
    count: int


class AnsweringWorker:
    """Called through collective_rpc; whatever its methods raise reaches the caller."""

    _intellect: _Work

    def intellect_install(self) -> None:
        """Replace the sampler. Raises ModelError where this vLLM is another than expected."""
        self._intellect = _Work(Runner(self))

    def intellect_begin(self, job: Job, vocab_size: int, hidden_size: int) -> None:
        """Draw for the requests of a job from now on, and for no others."""
        self._intellect.begin(job, vocab_size, hidden_size)

    def intellect_take(self, wait: bool) -> Taken:
        """Answers that have become finished."""
        answers = self._intellect.answers
        return Taken() if answers is None else answers.take(wait=wait)

    def intellect_drop(self, requests: list[int]) -> None:
        """Give up requests of the job."""
        if self._intellect.answers is not None:
            self._intellect.answers.drop(requests)

    def intellect_end(self) -> None:
        """Let go of the job and of all states."""
        self._intellect.end()

    def intellect_states(self, key: int) -> Tensor | None:
        """The states of a sequence that was computed, [N, H] on the CPU; only the first worker has them."""
        return self._intellect.states.pop(key, None)

    def intellect_logits(self, states: Tensor) -> NDArray[np.float32] | None:
        """Logits of states [N, H]; not every worker has them."""
        logits = self._intellect.runner.logits(states)
        return None if logits is None else logits.cpu().numpy()

    def intellect_update(self, model_dir: str) -> None:
        """Take other weights in place."""
        self._intellect.runner.reload(Path(model_dir))


class _Work:
    """State of a worker between calls."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.answers: Answers | None = None
        self.states: dict[int, Tensor] = {}
        self._tags: list[Mapping[str, Any]] = []
        self._requests: NDArray[np.int64] = np.empty(0, np.int64)
        """Of each of the tags, the request of the present job; -1 where it is no answer of it."""
        runner.watch(self._draw)

    def begin(self, job: Job, vocab_size: int, hidden_size: int) -> None:
        self.end()
        self.answers = Answers(
            job,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            device=self.runner.device,
            record=self.runner.leads,
        )

    def end(self) -> None:
        if self.answers is not None:
            self.answers.close()
        self.answers = None
        self.states.clear()
        self._tags = []

    @torch.inference_mode()
    def _draw(self, step: Step) -> Tensor:
        requests = self._requests_of(step.tags)
        if self.runner.leads and (requests < 0).any():
            self._keep_states(step)
        if self.answers is None:
            return torch.zeros(len(step.tags), dtype=torch.int64, device=step.logits.device)
        due = np.where(step.partial, -1, requests)
        steps = step.first + step.counts - step.prompt_tokens
        return self.answers.draw(due, steps, hidden=step.last_states, logits=step.logits)

    def _requests_of(self, tags: list[Mapping[str, Any]]) -> NDArray[np.int64]:
        if tags is not self._tags:
            job = None if self.answers is None else self.answers.job.id
            of_job = [tag["request"] if "request" in tag and tag["job"] == job else -1 for tag in tags]
            self._tags, self._requests = tags, np.array(of_job, np.int64)
        return self._requests

    def _keep_states(self, step: Step) -> None:
        """Copy what is wanted of the sequences that this pass computed a part of."""
        starts = np.cumsum(step.counts) - step.counts
        for row, tag in enumerate(step.tags):
            if "states" in tag:
                wanted = Wanted(tag["first"], tag["count"])
                self._keep(step, wanted, key=tag["states"], row=row, start=int(starts[row]))

    def _keep(self, step: Step, wanted: Wanted, *, key: int, row: int, start: int) -> None:
        first, count = int(step.first[row]), int(step.counts[row])
        skip = max(0, wanted.first - first)
        if skip >= count:
            return
        part = step.states[start + skip : start + count].cpu()
        if key not in self.states:
            self.states[key] = torch.empty(wanted.count, part.shape[1], dtype=part.dtype)
        place = first + skip - wanted.first
        self.states[key][place : place + len(part)] = part
