"""Continuous batching: requests wait, join the batch when there is room, and leave it when they are finished.

Bounded by a number of rows. What one answer gets depends on its prompt and seed alone, so an answer that has to begin
again, because memory ran out, comes out the same. Works over any `Rows` (node.engines.rows).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from node.engines.base import (
    FinishReason,
    Generation,
    GenerationRequest,
    GenerationStream,
    SamplingParams,
    TokenProgress,
)
from node.engines.draws import Draws
from node.engines.memory import is_out_of_memory, no_room, release_memory
from node.engines.proofs import ProofRecorder, Proofs, are_done, proofs_of
from node.engines.rows import Prompt, Rows, States
from protocol.errors import ModelError

_JOIN_SHARE: Final = 8
"""Requests join when one row of so many is free: reading prompts one by one is slow."""
_FIRST_COLUMNS: Final = 64
_SPARE_COLUMNS: Final = 64
"""By so many columns the window's memory is longer than an answer may be: it moves back when they are used up."""


@dataclass(frozen=True)
class Runner:
    """What decoding asks of an engine."""

    vocab_size: int
    hidden_size: int
    device: torch.device
    pass_tokens: int
    """Positions of prompts, padding included, that are read together."""
    new_rows: Callable[[int, int], Rows]
    """(most rows, columns) to an empty batch."""
    most_rows: Callable[[int], int]
    """How many rows of so many columns the engine allows and the memory holds."""
    too_many: Callable[[int], None]
    """Told the number of rows that was too much for the memory."""


class Decoding(GenerationStream):
    """The requests of one call."""

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        *,
        progress: TokenProgress | None = None,
        threaded_proofs: bool = False,
    ) -> None:
        self._runner = runner
        self._job = _Job([tuple(each.prompt_ids) for each in requests], [each.seed for each in requests], sampling)
        self._progress = progress
        self._threaded_proofs = threaded_proofs
        self._answers = self._run()

    def __next__(self) -> tuple[int, Generation]:
        return next(each for each in self._answers if each[0] not in self._job.cancelled)

    def cancel(self, *indices: int) -> None:
        self._job.cancel(indices)

    def close(self) -> None:
        self._answers.close()

    def _run(self) -> Generator[tuple[int, Generation]]:
        """One batch; another one only after memory ran out."""
        while self._job.waiting:
            columns = self._job.longest + _SPARE_COLUMNS
            rows = min(len(self._job.waiting), self._runner.most_rows(columns))
            if rows == len(self._job.waiting):
                columns -= _SPARE_COLUMNS  # all begin together, so that the window never moves back
            under_way: list[int] = []
            try:
                yield from self._batch(rows, columns, under_way)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if rows == 1:
                    raise no_room(error) from error
                self._runner.too_many(rows)
                self._job.again(under_way)
            release_memory(self._runner.device)

    def _batch(self, rows: int, columns: int, under_way: list[int]) -> Iterator[tuple[int, Generation]]:
        """Answers of one batch. Where it ends early, `under_way` is what was not finished."""
        batch = _Batch(self._runner, self._job, rows=rows, threaded_proofs=self._threaded_proofs)
        try:
            yield from batch.run(self._runner.new_rows(rows, columns), self._report)
        finally:
            under_way += batch.requests.tolist()
            batch.close()
        yield from batch.late_answers(wait=True)

    def _report(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress(tokens)


class _Job:
    """What is asked for, and what of it waits. Short prompts first, so that those read together are of like length."""

    def __init__(self, prompts: list[Prompt], seeds: list[bytes], sampling: SamplingParams) -> None:
        self.prompts = prompts
        self.seeds = seeds
        self.sampling = sampling
        self.waiting = deque(sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index)))
        self.cancelled: frozenset[int] = frozenset()
        self.tokens = 0
        """Of answers that are finished."""
        self._lock = threading.Lock()

    @property
    def longest(self) -> int:
        """Tokens that an answer with its prompt may have."""
        return max(len(self.prompts[index]) for index in self.waiting) + self.sampling.max_new_tokens

    def cancel(self, indices: Sequence[int]) -> None:
        with self._lock:
            self.cancelled |= set(indices)

    def take(self, most: int, *, pass_tokens: int) -> list[int]:
        """The next requests whose different prompts can be read in one pass; one at least where any waits."""
        taken: list[int] = []
        different: set[Prompt] = set()
        while self.waiting and len(taken) < most:
            index = self.waiting[0]
            if index not in self.cancelled:
                prompt = self.prompts[index]
                if taken and prompt not in different and (len(different) + 1) * len(prompt) > pass_tokens:
                    break
                different.add(prompt)
                taken.append(index)
            self.waiting.popleft()
        return taken

    def again(self, indices: Sequence[int]) -> None:
        """Requests whose answers were lost."""
        self.waiting.extendleft(sorted(indices, key=lambda index: (len(self.prompts[index]), index), reverse=True))


class _Batch:
    """Answers under way. Arrays hold a value a row; a slot is a row's place in buffers, where it stays."""

    def __init__(self, runner: Runner, job: _Job, *, rows: int, threaded_proofs: bool) -> None:
        self._runner = runner
        self._job = job
        self._most = job.sampling.max_new_tokens
        self._stops = np.zeros(runner.vocab_size, bool)
        self._stops[[token for token in job.sampling.stop_ids if 0 <= token < runner.vocab_size]] = True
        self.requests = np.empty(0, np.int64)
        self._slots = np.empty(0, np.int64)
        self._steps = np.empty(0, np.int64)
        self._free = list(range(rows))
        self._capacity = rows
        self._tokens = np.empty((rows, min(_FIRST_COLUMNS, self._most)), np.int64)
        self._logprobs = np.empty(self._tokens.shape, np.float32)
        self._draws = Draws(
            job.seeds,
            slots=rows,
            vocab_size=runner.vocab_size,
            max_tokens=self._most,
            temperature=job.sampling.temperature,
        )
        self._proofs = ProofRecorder(
            rows,
            runner.hidden_size,
            top_k=job.sampling.top_k_proof,
            threaded=threaded_proofs,
        )
        self._late: list[tuple[int, Generation, Proofs]] = []

    def run(self, rows: Rows, report: TokenProgress) -> Iterator[tuple[int, Generation]]:
        """Answers as they are finished, until nothing waits. Raises whatever running out of memory raises."""
        states: States | None = None
        while (states := self._join(rows, states)) is not None:
            tokens, ended = self._draw(*states)
            report(self._job.tokens + int(self._steps.sum()))
            if ended.any():
                tokens = tokens[self._leave(rows, ended)]
            states = rows.step(tokens) if len(tokens) else None
            if self._late:
                yield from self.late_answers(wait=False)

    def late_answers(self, *, wait: bool) -> Iterator[tuple[int, Generation]]:
        """Finished answers, once they are proved."""
        finished, self._late = self._late, []
        for late in finished:
            index, generation, proofs = late
            if wait or are_done(proofs):
                generation.proofs.extend(proofs_of(proofs))
                yield index, generation
            else:
                self._late.append(late)

    def close(self) -> None:
        self._proofs.close()

    def _join(self, rows: Rows, states: States | None) -> States | None:
        """Fill free rows with what waits, behind the rows under way; None when there is nothing at all."""
        if len(self.requests) and not (rows.joins_running and len(self._free) * _JOIN_SHARE >= self._capacity):
            return states
        while self._free and (taken := self._job.take(len(self._free), pass_tokens=self._runner.pass_tokens)):
            waiting = self._job.waiting
            to_come = self._job.prompts[waiting[0]] if waiting else None
            joined = rows.join([self._job.prompts[index] for index in taken], to_come=to_come)
            states = (
                joined if states is None else (torch.cat([states[0], joined[0]]), torch.cat([states[1], joined[1]]))
            )
            slots = [self._free.pop() for _ in taken]
            for slot, index in zip(slots, taken, strict=True):
                self._draws.join(slot, index)
            self.requests = np.append(self.requests, taken)
            self._slots = np.append(self._slots, slots)
            self._steps = np.append(self._steps, np.zeros(len(taken), np.int64))
            if not rows.joins_running:
                break
        return states

    def _draw(self, hidden: torch.Tensor, logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """A token for every row, and which rows end with it."""
        tokens, logprobs = self._draws.draw(logits, self._slots, self._steps)
        if not np.isfinite(logprobs).all():
            raise ModelError("the policy gives logits that are not finite: its weights are broken")
        self._write(tokens, logprobs)
        steps, self._steps = self._steps, self._steps + 1
        ended = self._stops[tokens] | (self._steps == self._most)
        self._proofs.add(hidden, self._slots, steps, ends=ended)
        if self._job.cancelled:
            ended |= np.isin(self.requests, list(self._job.cancelled))
        return tokens, ended

    def _write(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        if int(self._steps.max()) == self._tokens.shape[1]:
            wider = (0, 0), (0, min(2 * self._tokens.shape[1], self._most) - self._tokens.shape[1])
            self._tokens, self._logprobs = np.pad(self._tokens, wider), np.pad(self._logprobs, wider)
        self._tokens[self._slots, self._steps] = tokens
        self._logprobs[self._slots, self._steps] = logprobs

    def _leave(self, rows: Rows, ended: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Take finished rows out, the last ones moving into their places; the rows that stay, in their new order."""
        for row in np.flatnonzero(ended).tolist():
            self._finish(int(self.requests[row]), int(self._slots[row]), int(self._steps[row]))
        count = len(ended) - int(ended.sum())
        order = np.arange(count)
        order[ended[:count]] = count + np.flatnonzero(~ended[count:])
        rows.keep(order)
        self.requests, self._slots, self._steps = self.requests[order], self._slots[order], self._steps[order]
        return order

    def _finish(self, index: int, slot: int, length: int) -> None:
        self._free.append(slot)
        proofs = self._proofs.take(slot)
        if index in self._job.cancelled:
            return
        self._job.tokens += length
        output_ids = self._tokens[slot, :length].tolist()
        reason: FinishReason = "stop" if self._stops[output_ids[-1]] else "length"
        generation = Generation(output_ids, self._logprobs[slot, :length].tolist(), reason, [])
        self._late.append((index, generation, proofs))
