"""vLLM as an engine: its scheduler, cache and kernels; this project's noise, log-probabilities and proofs.

Answers and proofs are kept inside vLLM's workers (node.engines.vllm_worker). Checkpoints are loaded into the running
engine. Leaves out sharing a policy between devices, which is vLLM's own tensor parallelism.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
from node.engines.memory import check_dtype, is_slow, open_device
from node.engines.model_config import UnsupportedArchitecture, read_config
from node.engines.models import other_architecture
from node.engines.proofs import patterns
from node.engines.torch_engine import DTYPES
from node.engines.transformers_model import refuse_code
from node.engines.vllm_core import STALL_S, Core, Task, open_vllm
from node.engines.vllm_private import VERSION
from node.engines.vllm_settings import MOST_SEQUENCES, Settings, Sizes, engine_arguments
from node.engines.vllm_stream import VllmStream
from node.engines.weights import Shape, WeightFiles, tensor_shapes
from protocol.errors import ModelError

_log = logging.getLogger(__name__)
_keys = itertools.count(1)


class VllmEngine(Engine):
    """One policy in vLLM.

    Differs from the interface in two ways: running out of memory raises MemoryError, on which a compute process ends
    and its successor takes a smaller batch; and `load` beside a policy of another architecture ends that one first.
    """

    def __init__(
        self,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 64,
        max_memory_bytes: int = 0,
        tensor_parallel: int = 1,
        stall_s: float = STALL_S,
    ) -> None:
        """`tensor_parallel` devices from `device` on share the policy. After `stall_s` in a step the process ends.

        Raises ModelError where vLLM is not installed for this device.
        """
        if dtype not in DTYPES:
            raise ModelError(f"the vLLM engine has no dtype {dtype[:40]!r}", hint=f"use one of {', '.join(DTYPES)}")
        if not 1 <= max_batch <= MOST_SEQUENCES:
            raise ModelError(f"a batch of {max_batch} sequences is not possible: 1 … {MOST_SEQUENCES}")
        self._settings = Settings(dtype, device, max_memory_bytes, tensor_parallel)
        open_vllm(self._settings)
        where = open_device("cpu" if self._settings.on_cpu else "cuda")
        check_dtype(DTYPES[dtype], where)
        if is_slow(DTYPES[dtype], where):
            _log.warning("bfloat16 without instructions for it, as on this CPU, is several times slower than float32")
        self.max_batch = max_batch
        self._stall_s = stall_s
        self._core: Core | None = None
        self._architecture: _Architecture | None = None

    @property
    def info(self) -> EngineInfo:
        core = self._held
        return EngineInfo(
            name="vllm",
            version=VERSION,
            dtype=self._settings.dtype,
            device=self._settings.devices,
            vocab_size=core.vocab_size,
            hidden_size=core.hidden_size,
            max_model_len=core.max_model_len,
        )

    def load(self, model_dir: Path) -> None:
        """As in the interface; what is checked before vLLM tries it changes nothing."""
        architecture = _Architecture(model_dir)
        self._drop_unsound()
        if self._core is not None and architecture == self._architecture:
            return self._reload(model_dir)
        sizes = architecture.sizes(DTYPES[self._settings.dtype].itemsize)
        self.close()
        self._core = Core(model_dir, self._settings, sizes, stall_s=self._stall_s)
        self._architecture = architecture

    def update(self, model_dir: Path) -> None:
        self._drop_unsound()
        if self._core is None:
            return self.load(model_dir)
        if _Architecture(model_dir) != self._architecture:
            raise other_architecture(model_dir)
        self._reload(model_dir)

    def stream(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> GenerationStream:
        core, info = self._held, self.info
        check_sampling(sampling)
        for request in requests:
            check_request(info, request, sampling)
        return VllmStream(
            core,
            requests,
            sampling,
            max_batch=min(self.max_batch, MOST_SEQUENCES),
            progress=progress,
        )

    def prefill(self, sequences: Sequences) -> Iterator[Prefill]:
        info = self.info
        for prompt_ids, output_ids in sequences:
            check_sequence(info, prompt_ids, output_ids)
        numbers = iter(range(len(sequences)))
        under_way: dict[str, int] = {}
        try:
            while True:
                for number in itertools.islice(numbers, self.max_batch - len(under_way)):
                    under_way[self._compute(sequences, number)] = number
                if not under_way:
                    return
                for name, _ in self._held.step():
                    states = self._held.ask("intellect_states", int(name.removeprefix("states-")))[0]
                    yield Prefill(under_way.pop(name), patterns(states), self._logits_of(states))
        finally:
            self._held.abort(list(under_way))

    def close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _drop_unsound(self) -> None:
        if self._core is not None and not self._core.sound:
            self.close()

    @property
    def _held(self) -> Core:
        self._drop_unsound()
        if self._core is None:
            raise ModelError("the engine holds no policy yet", hint="call load(model_dir) first")
        return self._core

    def _reload(self, model_dir: Path) -> None:
        """Weights in place. Whatever fails half-way leaves no policy."""
        try:
            self._held.ask("intellect_update", str(model_dir))
            self._held.forget()
        except Exception as error:
            # The border to vLLM: no error leaves its weights sound.
            self.close()
            if isinstance(error, ModelError):
                raise
            reason = (str(error).splitlines() or [""])[0][:200]
            raise ModelError(
                f"vLLM could not take the weights in {model_dir}: {type(error).__name__}: {reason}"
            ) from error

    def _compute(self, sequences: Sequences, number: int) -> str:
        """Ask for the states of a finished sequence; the name of the request."""
        prompt_ids, output_ids = sequences[number]
        key = next(_keys)
        tag = {"states": key, "first": len(prompt_ids) - 1, "count": len(output_ids)}
        task = Task(f"states-{key}", (*prompt_ids, *output_ids[:-1]), 1, (), tag, read_anew=True)
        self._held.add(task)
        return task.name

    def _logits_of(self, states: Tensor) -> Any:
        def logits(start: int, stop: int) -> NDArray[np.float32]:
            answers = self._held.ask("intellect_logits", states[start:stop])
            found: NDArray[np.float32] = next(each for each in answers if each is not None)
            return found

        return logits


def plain_arguments(model_dir: Path) -> dict[str, Any]:
    """What vLLM is started with on this CPU, in float32, without this project's part: to compare with."""
    settings = Settings("float32", "cpu", max_memory_bytes=0, tensor_parallel=1)
    arguments = engine_arguments(model_dir, settings, _Architecture(model_dir).sizes(DTYPES[settings.dtype].itemsize))
    del arguments["worker_extension_cls"]
    return arguments


class _Architecture:
    """What two checkpoints of one run have in common: configuration, and the names and shapes of all tensors."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ModelError where the directory is incomplete."""
        refuse_code(model_dir / "config.json")
        try:
            WeightFiles(model_dir, read_config(model_dir), dtype=DTYPES["float32"])
        except UnsupportedArchitecture as error:
            _log.info("not checked tensor by tensor reason=%r", error.message)
        self._model_dir = model_dir
        self._config = json.loads((model_dir / "config.json").read_bytes())
        self._shapes: dict[str, Shape] = tensor_shapes(model_dir)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Architecture) and (self._config, self._shapes) == (other._config, other._shapes)

    __hash__ = None  # type: ignore[assignment]

    def sizes(self, value_bytes: int) -> Sizes:
        """Bytes, with values of so many. Raises ModelError where transformers cannot read the configuration."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(str(self._model_dir), local_files_only=True).get_text_config()
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            token_values, max_model_len = (
                2 * config.num_hidden_layers * heads * head_dim,
                config.max_position_embeddings,
            )
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"the configuration in {self._model_dir} cannot be used: {str(error)[:200]}",
                hint="check that the model is complete, and that transformers has its architecture",
            ) from error
        values = sum(int(np.prod(shape)) for shape in self._shapes.values())
        return Sizes(values * value_bytes, token_values * value_bytes, max_model_len)
