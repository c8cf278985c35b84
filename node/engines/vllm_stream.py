"""The answers to one call of the vLLM engine: requests go in as others leave, finished ones come out.

At most `max_batch` are vLLM's at a time, so that those that are given up early never begin.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from node.engines.base import Generation, GenerationRequest, GenerationStream, SamplingParams, TokenProgress
from node.engines.vllm_answers import Job, Taken
from node.engines.vllm_core import Core, Task
from protocol.errors import ModelError

_PROGRESS_EVERY_S: Final = 0.2
_job_ids = itertools.count(1)


class VllmStream(GenerationStream):
    """Requests of one call, already checked."""

    def __init__(
        self,
        core: Core,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        *,
        max_batch: int,
        progress: TokenProgress | None = None,
    ) -> None:
        self._core = core
        self._requests = requests
        self._sampling = sampling
        self._max_batch = max_batch
        self._progress = progress
        self._reported_at = time.monotonic()
        self._waiting = deque(range(len(requests)))
        self._under_way: set[int] = set()
        self._told: dict[int, list[int]] = {}
        """Tokens of answers that vLLM says are finished, until those who drew them agree."""
        self._cancelled: frozenset[int] = frozenset()
        self._job = Job(next(_job_ids), tuple(each.seed for each in requests), sampling, min(max_batch, len(requests)))
        self._answers = self._run()

    def __next__(self) -> tuple[int, Generation]:
        return next(each for each in self._answers if each[0] not in self._cancelled)

    def cancel(self, *indices: int) -> None:
        self._cancelled |= set(indices)

    def close(self) -> None:
        self._answers.close()

    def _run(self) -> Generator[tuple[int, Generation], None, None]:
        if not self._requests:
            return
        self._core.ask("intellect_begin", self._job, self._core.vocab_size, self._core.hidden_size)
        try:
            while self._waiting or self._under_way:
                yield from self._step()
        finally:
            self._end()

    def _end(self) -> None:
        if self._core.sound:
            self._core.abort([self._name(index) for index in self._under_way])
            self._core.ask("intellect_end")

    def _step(self) -> list[tuple[int, Generation]]:
        """One pass, and the answers that it finished."""
        self._give_up()
        self._fill()
        if len(self._told) < len(self._under_way):
            for name, tokens in self._core.step():
                self._told[int(name.partition("-")[2])] = tokens
        waits = len(self._told) == len(self._under_way)  # nothing is left to compute
        due = time.monotonic() - self._reported_at >= _PROGRESS_EVERY_S and self._progress is not None
        return self._collect(waits) if self._told or due else []

    def _fill(self) -> None:
        while self._waiting and len(self._under_way) < self._max_batch:
            index = self._waiting.popleft()
            if index in self._cancelled:
                continue
            self._under_way.add(index)
            self._core.add(
                Task(
                    self._name(index),
                    self._requests[index].prompt_ids,
                    self._sampling.max_new_tokens,
                    [token for token in self._sampling.stop_ids if 0 <= token < self._core.vocab_size],
                    {"job": self._job.id, "request": index},
                )
            )

    def _give_up(self) -> None:
        gone = sorted(self._under_way & self._cancelled)
        if gone:
            self._core.abort([self._name(index) for index in gone])
            self._core.ask("intellect_drop", gone)
            self._under_way.difference_update(gone)
            self._told = {index: tokens for index, tokens in self._told.items() if index not in gone}

    def _collect(self, wait: bool) -> list[tuple[int, Generation]]:
        """Finished answers from the first worker."""
        taken: Taken = self._core.ask("intellect_take", wait)[0]
        if taken.fault:
            raise ModelError(taken.fault)
        for index, generation in taken.answers:
            if index not in self._under_way:
                continue
            if self._told.pop(index, None) != generation.output_ids:
                raise ModelError(f"vLLM and the record of its draws differ about the answer to request {index}")
            self._under_way.discard(index)
        self._report(taken.tokens)
        return taken.answers

    def _report(self, tokens: int) -> None:
        if self._progress is not None:
            self._reported_at = time.monotonic()
            self._progress(tokens)

    def _name(self, index: int) -> str:
        return f"{self._job.id}-{index}"
