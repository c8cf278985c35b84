"""Answers under way inside vLLM: draws the tokens of its batches with the protocol's noise, keeps what proves them.

Everything goes by the number of a token in its answer, so it does not matter in which order vLLM computes: requests may
wait, read their prompts in pieces, be put off and read again, or run one step too far. Knows nothing of vLLM itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.base import FinishReason, Generation, SamplingParams
from node.engines.draws import Draws, device_noise
from node.engines.proofs import ProofRecorder, Proofs, are_done, proofs_of
from protocol.sampling import position_keys

_STEPS_BEHIND: Final = 64
"""By so many steps recording may lag behind drawing on a device."""
_NOISE_VALUES: Final = 1 << 25
"""Noise values that are computed together on a device: each takes about 16 bytes meanwhile."""
_FIRST_COLUMNS: Final = 64


@dataclass(frozen=True)
class Job:
    """The requests of one call, by number."""

    id: int
    seeds: tuple[bytes, ...]
    sampling: SamplingParams
    slots: int
    """Answers that are under way together at most."""


@dataclass
class Taken:
    """Finished answers by request, how many tokens there are in all, and what went wrong (empty: nothing)."""

    answers: list[tuple[int, Generation]] = field(default_factory=list)
    tokens: int = 0
    fault: str = ""


class _Draw(Protocol):
    def join(self, slot: int, request: int) -> None: ...

    def draw(self, logits: Tensor, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> tuple[Tensor, Tensor]: ...


class Answers:
    """The answers of one job. `draw`, `take` and `drop` are one thread's."""

    def __init__(self, job: Job, *, vocab_size: int, hidden_size: int, device: torch.device, record: bool) -> None:
        """Without `record` tokens are drawn only: by workers that compute the same as another one."""
        self.job = job
        self._device = device
        make = _HostDraws if device.type == "cpu" else DeviceDraws
        self._draws: _Draw = make(job, vocab_size)
        self._record = _Record(job, vocab_size, hidden_size, threaded=device.type != "cpu") if record else None
        self._slots = np.full(len(job.seeds), -1, np.int64)
        """Of each request; -1: it has none yet, or no longer."""
        self._over = np.zeros(len(job.seeds), bool)
        self._free = list(range(job.slots))
        self._drawn = np.full((job.slots, 2), -1, np.int64)
        """Of each slot: the draw that it was last part of, and the token drawn then."""
        self._draw_count = 0

    def draw(self, requests: NDArray[np.int64], steps: NDArray[np.int64], *, hidden: Tensor, logits: Tensor) -> Tensor:
        """A token for every row, int64 [rows]: token number `steps` of the answer to a request; -1: none is due there.

        `hidden` [rows, H] are the states that gave `logits` [rows, V].
        """
        due = np.flatnonzero((requests >= 0) & ~self._over[requests])
        if 0 < len(due) == len(requests):
            return self._draw(requests, steps, hidden=hidden, logits=logits)
        tokens = torch.zeros(len(requests), dtype=torch.int64, device=self._device)
        if len(due):
            rows = torch.from_numpy(due).to(self._device)
            tokens[rows] = self._draw(requests[due], steps[due], hidden=hidden[rows], logits=logits[rows])
        return tokens

    def _draw(self, requests: NDArray[np.int64], steps: NDArray[np.int64], *, hidden: Tensor, logits: Tensor) -> Tensor:
        slots = self._slots_of(requests, steps)
        chosen, logprobs = self._draws.draw(logits, slots, steps)
        if self._record is not None:
            self._record.add(_Drawn(requests, slots, steps, chosen, logprobs, hidden))
        return chosen

    def take(self, *, wait: bool) -> Taken:
        """Answers that are finished and proved; all that are finished with `wait`."""
        if self._record is None:
            return Taken()
        taken = self._record.take(wait=wait)
        self.drop([request for request, _ in taken.answers])
        return taken

    def drop(self, requests: Sequence[int]) -> None:
        """Forget requests: none of them is drawn for any more."""
        over = np.unique(np.array(requests, np.int64))
        self._over[over] = True
        held = self._slots[over]
        self._free += held[held >= 0].tolist()
        self._slots[over] = -1

    def close(self) -> None:
        if self._record is not None:
            self._record.close()

    def _slots_of(self, requests: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        for request in requests[self._slots[requests] < 0].tolist():
            self._slots[request] = self._free.pop()
        slots: NDArray[np.int64] = self._slots[requests]
        self._draw_count += 1
        follows = (self._drawn[slots, 0] == self._draw_count - 1) & (self._drawn[slots, 1] == steps - 1)
        for row in np.flatnonzero(~follows | (steps == 0)).tolist():  # noise made ahead is for draws without a gap
            self._draws.join(int(slots[row]), int(requests[row]))
        self._drawn[slots, 0], self._drawn[slots, 1] = self._draw_count, steps
        return slots


class _HostDraws:
    """node.engines.draws on a CPU."""

    def __init__(self, job: Job, vocab_size: int) -> None:
        sampling = job.sampling
        self._draws = Draws(
            job.seeds,
            slots=job.slots,
            vocab_size=vocab_size,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
        )

    def join(self, slot: int, request: int) -> None:
        self._draws.join(slot, request)

    def draw(self, logits: Tensor, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        tokens, logprobs = self._draws.draw(logits.float(), slots, steps)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)


class DeviceDraws:
    """Draws on a device without waiting for it, so that vLLM can prepare the next step meanwhile."""

    def __init__(self, job: Job, vocab_size: int) -> None:
        self._job = job
        self._rows = max(1, _NOISE_VALUES // vocab_size)
        self._keys = np.zeros((job.slots, job.sampling.max_new_tokens, 2), np.uint32)

    def join(self, slot: int, request: int) -> None:
        self._keys[slot] = position_keys(self._job.seeds[request], self._job.sampling.max_new_tokens)

    def draw(self, logits: Tensor, slots: NDArray[np.int64], steps: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        keys, temperature = self._keys[slots, steps], self._job.sampling.temperature
        tokens, logprobs = [], []
        for start in range(0, len(slots), self._rows):
            part = logits[start : start + self._rows].float()
            noisy = device_noise(keys[start : start + self._rows], part.shape[1], device=part.device)
            chosen = noisy.mul_(temperature).add_(part).argmax(1)
            scaled = part if temperature == 1.0 else part / temperature
            tokens.append(chosen)
            logprobs.append(torch.log_softmax(scaled, -1).gather(1, chosen[:, None])[:, 0])
        return torch.cat(tokens), torch.cat(logprobs)


@dataclass
class _Drawn:
    """One draw: arrays with a value a row."""

    requests: NDArray[np.int64]
    slots: NDArray[np.int64]
    steps: NDArray[np.int64]
    tokens: Tensor
    logprobs: Tensor
    hidden: Tensor
    ready: Any = None
    """Event after which the tensors, which are on their way from a device, are complete."""

    def only(self, rows: NDArray[np.bool_]) -> _Drawn:
        """Of arrays on the host, the rows that are True; nearly always all."""
        if rows.all():
            return self
        chosen = torch.from_numpy(np.flatnonzero(rows))
        return _Drawn(
            self.requests[rows],
            self.slots[rows],
            self.steps[rows],
            self.tokens[chosen],
            self.logprobs[chosen],
            self.hidden[chosen],
        )

    def on_host(self) -> _Drawn:
        """The same with copies on the host, under way."""
        tokens, logprobs = _to_host(self.tokens), _to_host(self.logprobs)
        hidden = _to_host(self.hidden.to(torch.bfloat16))
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return _Drawn(self.requests, self.slots, self.steps, tokens, logprobs, hidden, ready)


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class _Record:
    """Tokens, log-probabilities and proofs by slot; beside a device a thread keeps them, off the path of decoding."""

    def __init__(self, job: Job, vocab_size: int, hidden_size: int, *, threaded: bool) -> None:
        self._most = job.sampling.max_new_tokens
        self._stops = np.zeros(vocab_size, bool)
        self._stops[[token for token in job.sampling.stop_ids if 0 <= token < vocab_size]] = True
        shape = job.slots, min(_FIRST_COLUMNS, self._most)
        self._tokens, self._logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self._lengths = np.zeros(job.slots, np.int64)
        self._ended = np.ones(job.slots, bool)
        self._proofs = ProofRecorder(job.slots, hidden_size, top_k=job.sampling.top_k_proof, threaded=False)
        self._finished: deque[tuple[int, Generation, Proofs]] = deque()
        self._count, self._fault = 0, ""
        self._queue: Queue[_Drawn | None] | None = None
        if threaded:
            self._queue = Queue(_STEPS_BEHIND)
            threading.Thread(target=self._keep, args=(self._queue,), daemon=True, name="answers").start()

    def add(self, drawn: _Drawn) -> None:
        if self._queue is None:
            self._add(drawn)
        else:
            self._queue.put(drawn if drawn.tokens.device.type == "cpu" else drawn.on_host())

    def take(self, *, wait: bool) -> Taken:
        if wait and self._queue is not None:
            self._queue.join()
        taken = Taken(tokens=self._count, fault=self._fault)
        for _ in range(len(self._finished)):
            request, generation, proofs = self._finished.popleft()
            if wait or are_done(proofs):
                generation.proofs.extend(proofs_of(proofs))
                taken.answers.append((request, generation))
            else:
                self._finished.append((request, generation, proofs))
        return taken

    def close(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
        self._proofs.close()

    def _keep(self, queue: Queue[_Drawn | None]) -> None:
        while (drawn := queue.get()) is not None:
            try:
                if drawn.ready is not None:
                    drawn.ready.synchronize()
                self._add(drawn)
            except Exception as error:
                # The border of the thread: whatever goes wrong is the caller's to hear, with the next answers.
                self._fault = self._fault or f"{type(error).__name__}: {error}"
            finally:
                queue.task_done()

    def _add(self, drawn: _Drawn) -> None:
        begun = drawn.slots[drawn.steps == 0]
        self._lengths[begun], self._ended[begun] = 0, False
        for slot in begun.tolist():
            self._proofs.take(slot)  # of an answer that was given up
        drawn = drawn.only(~self._ended[drawn.slots])  # an answer that has ended may run a step too far
        slots, steps, tokens, logprobs = drawn.slots, drawn.steps, drawn.tokens.numpy(), drawn.logprobs.numpy()
        if (steps > self._lengths[slots]).any():
            self._fault = self._fault or "a token of an answer is missing"
        if not np.isfinite(logprobs).all():
            self._fault = self._fault or "the policy gives logits that are not finite: its weights are broken"
        self._write(tokens, logprobs, slots, steps)
        fresh = drawn.only(steps == self._lengths[slots])  # not what is computed again after it was put off
        ends = self._stops[fresh.tokens.numpy()] | (fresh.steps + 1 == self._most)
        self._proofs.add(fresh.hidden, fresh.slots, fresh.steps, ends=ends)
        self._lengths[fresh.slots] += 1
        self._count += len(fresh.slots)
        for row in np.flatnonzero(ends).tolist():
            self._finish(int(fresh.requests[row]), int(fresh.slots[row]))

    def _write(
        self,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        slots: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> None:
        while len(steps) and int(steps.max()) >= self._tokens.shape[1]:
            more = (0, 0), (0, min(self._tokens.shape[1], self._most - self._tokens.shape[1]))
            self._tokens, self._logprobs = np.pad(self._tokens, more), np.pad(self._logprobs, more)
        self._tokens[slots, steps], self._logprobs[slots, steps] = tokens, logprobs

    def _finish(self, request: int, slot: int) -> None:
        self._ended[slot] = True
        length = int(self._lengths[slot])
        output_ids = self._tokens[slot, :length].tolist()
        reason: FinishReason = "stop" if self._stops[output_ids[-1]] else "length"
        generation = Generation(output_ids, self._logprobs[slot, :length].tolist(), reason, [])
        self._finished.append((request, generation, self._proofs.take(slot)))
