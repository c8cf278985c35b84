"""The built-in engine: generates and checks on any CPU or GPU that torch runs on.

Sampling is synchronised by seed (protocol.sampling), so an answer depends on the policy, the prompt and the seed alone,
never on its neighbours in the batch. Hidden states become TOPLOC proofs every 32 tokens, so their memory stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.base import (
    EngineInfo,
    Generation,
    GenerationRequest,
    Prefill,
    SamplingParams,
    Sequences,
    TokenProgress,
)
from node.engines.decoder import Decoder, KVCache
from node.engines.model_config import read_config
from node.engines.prompts import PASS_TOKENS, answer_states, read_prompts
from node.engines.weights import read_weights
from protocol.constants import PROOF_CHUNK_TOKENS
from protocol.errors import ModelError
from protocol.sampling import gumbel_rows, position_keys
from protocol.toploc import build_chunks

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPACT_BELOW: Final = 0.75
"""Share of unfinished rows under which finished ones are dropped from a batch."""


class TorchEngine:
    """Runs a Llama-family policy in plain torch. One policy at a time; not thread-safe."""

    def __init__(self, *, dtype: str = "float32", device: str = "cpu", max_batch: int = 64) -> None:
        if dtype not in DTYPES:
            raise ModelError(f"the torch engine has no dtype {dtype[:40]!r}", hint=f"use one of {', '.join(DTYPES)}")
        if max_batch < 1:
            raise ModelError(f"a batch of {max_batch} sequences is not possible")
        self._dtype = dtype
        self._device = _open_device(device)
        self._max_batch = max_batch
        self._decoder: Decoder | None = None

    @property
    def info(self) -> EngineInfo:
        config = self._loaded.config
        return EngineInfo(
            name="torch",
            version=torch.__version__,
            dtype=self._dtype,
            device=str(self._device),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_model_len=config.max_model_len,
        )

    def load(self, model_dir: Path) -> None:
        """Replace the policy; the old one stays where this raises ModelError."""
        config = read_config(model_dir)
        weights = read_weights(model_dir, config, dtype=DTYPES[self._dtype])
        self._decoder = Decoder(config, weights, device=self._device)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        """Answer every request, in order. Raises ModelError where a request does not fit the policy."""
        decoder = self._loaded
        _check_sampling(sampling)
        for request in requests:
            self._check_sequence(request.prompt_ids, new_tokens=sampling.max_new_tokens)
        order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), index))
        answers: dict[int, Generation] = {}
        for start in range(0, len(order), self._max_batch):
            part = order[start : start + self._max_batch]
            done = sum(len(answer.output_ids) for answer in answers.values())
            report = partial(_report, progress, done)
            answers.update(zip(part, _Batch(decoder, [requests[i] for i in part], sampling).run(report), strict=True))
        return [answers[index] for index in range(len(requests))]

    def prefill(self, sequences: Sequences) -> Iterator[Prefill]:
        """Compute finished sequences, similar lengths together; yields as passes finish. Raises ModelError."""
        decoder = self._loaded
        for prompt_ids, output_ids in sequences:
            self._check_sequence(prompt_ids, output_ids)
        lengths = [len(prompt_ids) + len(output_ids) - 1 for prompt_ids, output_ids in sequences]
        for part in _passes(lengths, max_rows=self._max_batch):
            states = answer_states(decoder, [sequences[index] for index in part])
            patterns = _patterns(states)
            for row, index in enumerate(part):
                count = len(sequences[index][1])
                yield Prefill(index, patterns[row, :count], partial(_logit_rows, decoder, states[row, :count]))

    @property
    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise ModelError("the engine holds no policy yet", hint="call load(model_dir) first")
        return self._decoder

    def _check_sequence(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int] | None = None, *, new_tokens: int = 0
    ) -> None:
        config = self._loaded.config
        if not prompt_ids or (output_ids is not None and not output_ids):
            raise ModelError("a sequence needs a prompt token at least, and an output token to be checked")
        ids = (*prompt_ids, *(output_ids or ()))
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            raise ModelError(f"a token id lies outside the policy's vocabulary of {config.vocab_size}")
        if len(ids) + new_tokens > config.max_model_len:
            raise ModelError(
                f"{len(ids)} tokens and {new_tokens} to come exceed the policy's {config.max_model_len} positions"
            )


class _Batch:
    """Requests that are decoded together: left-padded, prompts that occur more than once computed once."""

    _cache: KVCache
    _padding: Tensor
    """Columns in front of each row's prompt."""

    def __init__(self, decoder: Decoder, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._prompts = [tuple(request.prompt_ids) for request in requests]
        self._keys = np.stack([position_keys(request.seed, sampling.max_new_tokens) for request in requests])
        self._rows = np.arange(len(requests))
        """Request of each row of the cache."""
        self._live = np.ones(len(requests), dtype=bool)
        """Rows that are not finished."""
        self._output_ids: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._proofs = ProofRecorder(len(requests), decoder.config.hidden_size, top_k=sampling.top_k_proof)

    def run(self, report: Callable[[int], None]) -> list[Generation]:
        states = read_prompts(self._decoder, self._prompts, room=self._sampling.max_new_tokens)
        self._cache, self._padding, hidden = states.cache, states.padding, states.hidden
        for step in range(self._sampling.max_new_tokens):
            tokens = self._emit(hidden, step)
            report(sum(map(len, self._output_ids)))
            if not self._live.any() or step + 1 == self._sampling.max_new_tokens:
                break
            hidden = self._advance(tokens)
        return [self._generation(request) for request in range(len(self._prompts))]

    def _emit(self, hidden: Tensor, step: int) -> NDArray[np.int64]:
        """Draw a token for every row, record those of live rows, and mark the rows that end here."""
        temperature = self._sampling.temperature
        logits = self._decoder.logits(hidden)
        scores = logits.cpu().numpy()
        noise = gumbel_rows(self._keys[self._rows, step], scores.shape[1])
        tokens: NDArray[np.int64] = np.argmax(scores + np.float32(temperature) * noise, axis=1)
        chosen = torch.from_numpy(tokens).to(logits.device)
        logprobs = torch.log_softmax(logits / temperature, -1).gather(1, chosen[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(logprobs[self._live]).all():
            raise ModelError("the policy gives logits that are not finite: its weights are broken")
        ends = np.isin(tokens, self._sampling.stop_ids) | (step + 1 == self._sampling.max_new_tokens)
        self._proofs.add(hidden, self._rows, live=self._live, ends=ends, step=step)
        self._record(tokens, logprobs, ends)
        return tokens

    def _record(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], ends: NDArray[np.bool_]) -> None:
        live = self._live
        for request, token, logprob in zip(
            self._rows[live], tokens[live].tolist(), logprobs[live].tolist(), strict=True
        ):
            self._output_ids[request].append(token)
            self._logprobs[request].append(logprob)
        self._live = live & ~ends

    def _advance(self, tokens: NDArray[np.int64]) -> Tensor:
        """Feed the drawn tokens; hidden states of the next position [rows, H]."""
        if self._live.mean() < _COMPACT_BELOW:
            tokens = tokens[self._live]
            self._compact()
        inputs = torch.from_numpy(tokens).to(self._padding.device)[:, None]
        length = self._cache.length
        positions = (length - self._padding)[:, None]
        mask = None
        if self._padding.any():
            columns = torch.arange(length + 1, device=inputs.device)
            mask = (columns[None] >= self._padding[:, None])[:, None, None]
        return self._decoder.forward(inputs, positions, cache=self._cache, mask=mask)[:, -1]

    def _compact(self) -> None:
        keep = torch.from_numpy(np.flatnonzero(self._live)).to(self._padding.device)
        self._cache = self._cache.select(keep)
        self._padding = self._padding[keep]
        self._rows = self._rows[self._live]
        self._live = np.ones(len(self._rows), dtype=bool)

    def _generation(self, request: int) -> Generation:
        output_ids = self._output_ids[request]
        stopped = output_ids[-1] in self._sampling.stop_ids
        proofs = self._proofs.proofs[request]
        return Generation(output_ids, self._logprobs[request], "stop" if stopped else "length", proofs)


class ProofRecorder:
    """Keeps the rows of the current chunk of each answer, and proves the chunk when it is full or the answer ends."""

    def __init__(self, requests: int, hidden_size: int, *, top_k: int) -> None:
        self._top_k = top_k
        self._chunk = np.empty((requests if top_k else 0, PROOF_CHUNK_TOKENS, hidden_size), dtype=np.uint16)
        self.proofs: list[list[bytes]] = [[] for _ in range(requests)]

    def add(
        self,
        hidden: Tensor,
        requests: NDArray[np.int64],
        *,
        live: NDArray[np.bool_],
        ends: NDArray[np.bool_],
        step: int,
    ) -> None:
        """Take the states [rows, H] of one step; of each row its request, whether it is unfinished and whether it ends.

        Rows of one batch are at the same step, so chunks that close together have one length and are proved together.
        """
        if not self._top_k:
            return
        rows = step % PROOF_CHUNK_TOKENS + 1
        self._chunk[requests[live], rows - 1] = _patterns(hidden)[live]
        closing = requests[live & (ends | (rows == PROOF_CHUNK_TOKENS))]
        for request, proof in zip(closing, build_chunks(self._chunk[closing, :rows], self._top_k), strict=True):
            self.proofs[request].append(proof)


def _passes(lengths: Sequence[int], *, max_rows: int) -> Iterator[list[int]]:
    """Indices by rising length, cut so that no pass has too many rows or positions."""
    part: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if part and (len(part) == max_rows or (len(part) + 1) * lengths[index] > PASS_TOKENS):
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def _patterns(hidden: Tensor) -> NDArray[np.uint16]:
    """bf16 bit patterns of hidden states, rounded to nearest even: protocol.toploc.bf16_patterns on any device."""
    bits: NDArray[np.uint16] = hidden.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def _logit_rows(decoder: Decoder, hidden: Tensor, start: int, stop: int) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = decoder.logits(hidden[start:stop]).cpu().numpy()
    return logits


def _check_sampling(sampling: SamplingParams) -> None:
    if not sampling.temperature > 0 or sampling.max_new_tokens < 1 or sampling.top_k_proof < 0:
        raise ModelError(f"answers cannot be drawn with {sampling}")


def _report(progress: TokenProgress | None, done: int, tokens: int) -> None:
    if progress is not None:
        progress(done + tokens)


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ModelError(f"torch cannot use the device {name[:40]!r}: {reason}", hint="use cpu, or cuda") from error
    return device


def engine_from_environment() -> TorchEngine:
    """The engine that a compute process is told to run: INTELLECT_THREADS (0: torch's choice), _DTYPE and _DEVICE."""
    threads = int(os.environ.get("INTELLECT_THREADS", "1"))
    if threads:
        torch.set_num_threads(threads)
    return TorchEngine(
        dtype=os.environ.get("INTELLECT_DTYPE", "float32"), device=os.environ.get("INTELLECT_DEVICE", "cpu")
    )
