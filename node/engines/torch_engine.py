"""The built-in engine: generates and checks on any CPU or GPU that torch runs on.

Sampling is synchronised by seed (protocol.sampling), so an answer depends on the policy, the prompt and the seed alone,
never on its neighbours in the batch. Hidden states become TOPLOC proofs every 32 tokens, so their memory stays small.
Llama-family policies run in a decoder of its own, others in transformers' model, with the same loop around it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch

from node.engines.base import (
    Engine,
    EngineInfo,
    GenerationRequest,
    GenerationStream,
    Prefill,
    SamplingParams,
    Sequences,
    TokenProgress,
    check_request,
    check_sampling,
    check_sequence,
)
from node.engines.decoding import Decoding, Runner
from node.engines.memory import check_dtype, free_bytes, is_out_of_memory, is_slow, no_room, open_device
from node.engines.model_config import UnsupportedArchitecture
from node.engines.models import BuiltinModel, Model
from node.engines.prompts import PASS_TOKENS
from node.engines.rows import Rows
from protocol.errors import ModelError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PASS_SHARE: Final = 0.25
"""Of the free memory, for a pass over prompts or finished sequences; the rest is for rows."""
_LEAST_PASS_TOKENS: Final = 256
_LOGITS_COPIES: Final = 5
_log = logging.getLogger(__name__)

ModelKind = Literal["any", "transformers"]


class TorchEngine(Engine):
    """Runs a policy in torch. One policy at a time; not thread-safe."""

    def __init__(
        self,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 64,
        max_memory_bytes: int = 0,
        kind: ModelKind = "any",
    ) -> None:
        """`max_memory_bytes` bounds the process's memory (the device's, if it is not the CPU); 0: most of what is free.

        `kind` "transformers" takes transformers' own model even where the built-in decoder has the architecture.
        """
        if dtype not in DTYPES:
            raise ModelError(f"the torch engine has no dtype {dtype[:40]!r}", hint=f"use one of {', '.join(DTYPES)}")
        if max_batch < 1:
            raise ModelError(f"a batch of {max_batch} sequences is not possible")
        self._dtype = dtype
        self._device = open_device(device)
        check_dtype(DTYPES[dtype], self._device)
        if is_slow(DTYPES[dtype], self._device):
            _log.warning("bfloat16 without instructions for it, as on this CPU, is several times slower than float32")
        self.max_batch = max_batch
        self._max_memory_bytes = max_memory_bytes
        self._kind = kind
        self._model: Model | None = None
        self._room_bytes = 0

    @property
    def info(self) -> EngineInfo:
        model = self._loaded
        return EngineInfo(
            name=model.engine,
            version=model.version,
            dtype=self._dtype,
            device=str(self._device),
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            max_model_len=model.max_model_len,
        )

    def load(self, model_dir: Path) -> None:
        model = self._read(model_dir)
        room_bytes = free_bytes(self._device, limit=self._max_memory_bytes)
        if room_bytes < _LEAST_PASS_TOKENS * (model.pass_bytes + model.token_bytes):
            raise ModelError(
                f"the policy in {model_dir} leaves {max(0, room_bytes) >> 20} MiB of memory to compute in",
                hint="allow more with --max-memory, use a device that has more, or join a run of a smaller model",
            )
        self._model, self._room_bytes = model, room_bytes

    def update(self, model_dir: Path) -> None:
        model = self._model
        if model is None:
            return self.load(model_dir)
        try:
            model.update(model_dir)
        except BaseException:
            if not model.sound:
                self._model = None
            raise

    def stream(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> GenerationStream:
        model, info = self._loaded, self.info
        check_sampling(sampling)
        for request in requests:
            check_request(info, request, sampling)
        runner = Runner(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            device=self._device,
            pass_tokens=self._pass_tokens,
            new_rows=self._new_rows,
            most_rows=self._most_rows,
            too_many=self._lower,
        )
        threaded = self._device.type != "cpu"  # a CPU has nothing else to do meanwhile
        return Decoding(runner, requests, sampling, progress=progress, threaded_proofs=threaded)

    def prefill(self, sequences: Sequences) -> Iterator[Prefill]:
        info = self.info
        for prompt_ids, output_ids in sequences:
            check_sequence(info, prompt_ids, output_ids)
        done: set[int] = set()
        pass_tokens = self._pass_tokens
        while len(done) < len(sequences):
            left = [index for index in range(len(sequences)) if index not in done]
            chosen = [sequences[index] for index in left]
            try:
                for place, bits, logits in self._loaded.compute(chosen, pass_tokens=pass_tokens):
                    done.add(left[place])
                    yield Prefill(left[place], bits, logits)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if pass_tokens <= _LEAST_PASS_TOKENS:
                    raise no_room(error) from error
                pass_tokens //= 2

    def close(self) -> None:
        self._model = None

    @property
    def _loaded(self) -> Model:
        if self._model is None:
            raise ModelError("the engine holds no policy yet", hint="call load(model_dir) first")
        return self._model

    def _read(self, model_dir: Path) -> Model:
        dtype = DTYPES[self._dtype]
        if self._kind == "any":
            try:
                return BuiltinModel(model_dir, dtype=dtype, device=self._device)
            except UnsupportedArchitecture as error:
                _log.info("transformers' own model runs it reason=%r", error.message)
        from node.engines.transformers_model import TransformersModel

        return TransformersModel(model_dir, dtype=dtype, device=self._device)

    @property
    def _pass_tokens(self) -> int:
        model = self._loaded
        fit = int(_PASS_SHARE * self._room_bytes / (model.pass_bytes + model.token_bytes))
        return max(_LEAST_PASS_TOKENS, min(PASS_TOKENS, fit))

    def _most_rows(self, columns: int) -> int:
        fit = int((1 - _PASS_SHARE) * self._room_bytes / self._row_bytes(columns))
        if not fit:
            raise ModelError(
                f"an answer of {columns} tokens, prompt included, needs {self._row_bytes(columns) >> 20} MiB of memory",
                hint="allow more with --max-memory, use a device that has more, or join a run of shorter answers",
            )
        return min(self.max_batch, fit)

    def _row_bytes(self, columns: int) -> int:
        """Keys and values, what drawing needs, and a chunk of states."""
        model = self._loaded
        return columns * (model.token_bytes + 32) + _LOGITS_COPIES * 4 * model.vocab_size + 128 * model.hidden_size

    def _new_rows(self, rows: int, columns: int) -> Rows:
        return self._loaded.new_rows(rows, columns, pass_tokens=self._pass_tokens)

    def _lower(self, rows: int) -> None:
        self.max_batch = max(1, rows // 2)
        _log.warning("out of memory batch=%d next_batch=%d", rows, self.max_batch)


def transformers_engine(**options: Any) -> TorchEngine:
    """The engine that runs every architecture in transformers' model."""
    return TorchEngine(kind="transformers", **options)
