"""Any causal model that transformers has, run by transformers' own code with its own cache.

For architectures that the built-in decoder does not have. Final hidden states are what the output projection is given,
taken by a hook. Rows do not join a batch under way, and an update holds both policies for a moment. Code that comes
with a model is never run, and weights are read from safetensors only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.engines.base import Sequences
from node.engines.models import Computed, other_architecture, passes
from node.engines.proofs import patterns
from node.engines.rows import Prompt, Rows, States
from node.engines.weights import weight_files
from protocol.errors import ModelError

_COMPACT_BELOW = 0.75
"""Share of rows under way below which those that left are dropped from transformers' cache, which copies the others."""
_PROBE = 4


class TransformersModel:
    """A policy as transformers' model."""

    engine = "transformers"

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError where transformers cannot read it, or would have to run code that came with it."""
        import transformers

        self.version = transformers.__version__
        self.sound = True
        self._dtype, self._device = dtype, device
        self._model = _read(model_dir, dtype=dtype, device=device)
        config = self._model.config.get_text_config()
        self.hidden_size, self.max_model_len = config.hidden_size, config.max_position_embeddings
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = dtype.itemsize
        self.token_bytes = 2 * config.num_hidden_layers * heads * head_dim * size
        self.pass_bytes = 32 * config.hidden_size * size
        self._plain_head = self._probe()

    def update(self, model_dir: Path) -> None:
        fresh = _read(model_dir, dtype=self._dtype, device=self._device)
        if fresh.config.to_dict() | {"_name_or_path": ""} != self._model.config.to_dict() | {"_name_or_path": ""}:
            raise other_architecture(model_dir)
        self._model = fresh

    def new_rows(self, capacity: int, columns: int, *, pass_tokens: int) -> Rows:
        return _CachedRows(self)

    @torch.inference_mode()
    def compute(self, sequences: Sequences, *, pass_tokens: int) -> Iterator[Computed]:
        for part in passes(sequences, pass_tokens=pass_tokens):
            chosen = [sequences[index] for index in part]
            if self._plain_head:
                yield from self._compute_together(part, chosen)
            else:
                yield from (self._compute_alone(index, *each) for index, each in zip(part, chosen, strict=True))

    def forward(self, tokens: Tensor, mask: Tensor, *, cache: Any = None, last_only: bool = True) -> tuple[Any, Tensor]:
        """transformers' output and the states that its head was given; `mask` int64[B, columns so far]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        accepted = self._accepted
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": last_only}
        options["logits_to_keep"] = 1 if last_only else 0
        states: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda _, arguments: states.append(arguments[0]))
        try:
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                **{name: value for name, value in options.items() if name in accepted},
            )
        finally:
            hook.remove()
        return output, states[-1]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def _head(self) -> torch.nn.Module:
        head: torch.nn.Module = self._model.get_output_embeddings()
        return head

    @property
    def _accepted(self) -> set[str]:
        return set(inspect.signature(self._model.forward).parameters)

    @torch.inference_mode()
    def _probe(self) -> bool:
        """Whether logits are the head's product with the base model's last states, and nothing else."""
        tokens = torch.arange(_PROBE, device=self._device)[None]
        output, states = self.forward(tokens, torch.ones_like(tokens), last_only=False)
        base = self._model.base_model(input_ids=tokens).last_hidden_state
        return bool(torch.equal(base, states) and torch.equal(self._head(states), output.logits))

    def _compute_together(self, part: Sequence[int], sequences: Sequences) -> Iterator[Computed]:
        tokens, mask = _padded([[*prompt, *output[:-1]] for prompt, output in sequences], self._device, left=False)
        hidden = self._model.base_model(input_ids=tokens, attention_mask=mask).last_hidden_state
        for row, (index, (prompt, output)) in enumerate(zip(part, sequences, strict=True)):
            rows = hidden[row, len(prompt) - 1 : len(prompt) - 1 + len(output)]
            yield index, patterns(rows), partial(self._logits, rows)

    def _compute_alone(self, index: int, prompt: Sequence[int], output: Sequence[int]) -> Computed:
        tokens = torch.tensor([[*prompt, *output[:-1]]], device=self._device)
        computed, states = self.forward(tokens, torch.ones_like(tokens), last_only=False)
        logits = computed.logits[0, len(prompt) - 1 :].float().cpu().numpy()
        return index, patterns(states[0, len(prompt) - 1 :]), lambda start, stop: logits[start:stop]

    @torch.inference_mode()
    def _logits(self, hidden: Tensor, start: int, stop: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._head(hidden[start:stop]).float().cpu().numpy()
        return logits


class _CachedRows:
    """Rows in transformers' cache. Those that left stay in it until they are many, fed with what does not matter."""

    joins_running = False

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self._cache: Any = None
        self._mask = torch.empty(0, 0, dtype=torch.int64)
        self._places = torch.empty(0, dtype=torch.int64)
        """Of each row in the cache."""

    @torch.inference_mode()
    def join(self, prompts: Sequence[Prompt], *, to_come: Prompt | None) -> States:
        unique = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        tokens, mask = _padded(list(unique), self._model.device, left=True)
        output, states = self._model.forward(tokens, mask)
        rows = torch.tensor([unique[prompt] for prompt in prompts], device=tokens.device)
        self._cache = output.past_key_values
        if len(rows) != len(unique):
            self._cache.batch_select_indices(rows)
        self._mask, self._places = mask[rows], torch.arange(len(rows), device=tokens.device)
        return states[rows, -1], output.logits[rows, -1].float()

    @torch.inference_mode()
    def keep(self, rows: NDArray[np.int64]) -> None:
        self._places = self._places[torch.from_numpy(rows).to(self._places.device)]
        if 0 < len(self._places) < _COMPACT_BELOW * len(self._mask):
            self._cache.batch_select_indices(self._places)
            self._mask = self._mask[self._places]
            self._places = torch.arange(len(self._places), device=self._places.device)

    @torch.inference_mode()
    def step(self, tokens: NDArray[np.int64]) -> States:
        fed = torch.zeros(len(self._mask), 1, dtype=torch.int64, device=self._places.device)
        fed[self._places, 0] = torch.from_numpy(tokens).to(fed.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], 1)
        output, states = self._model.forward(fed, self._mask, cache=self._cache)
        self._cache = output.past_key_values
        return states[self._places, -1], output.logits[self._places, -1].float()


def _read(model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    weight_files(model_dir)
    refuse_code(model_dir / "config.json")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(
            f"transformers cannot load {model_dir}: {' '.join(str(error).split())[:200]}",
            hint="check that the model is complete, and that transformers has its architecture",
        ) from error
    missing = sorted({*loading["missing_keys"], *map(str, loading["mismatched_keys"])})
    if missing:  # transformers would draw them at random
        raise ModelError(
            f"{model_dir} lacks {len(missing)} tensors, the first is {missing[0][:120]}",
            hint="the directory is incomplete: download the model again",
        )
    if getattr(model, "_is_stateful", False) or model.get_output_embeddings() is None:
        raise ModelError(f"{model_dir} is no causal model with keys and values: its states cannot be batched by row")
    return model.to(device).eval()


class _Declared(msgspec.Struct):
    auto_map: Any = None
    quantization_config: Any = None


def refuse_code(path: Path) -> None:
    """Raise ModelError where a config.json asks for code of its own, or for quantised weights."""
    try:
        declared = msgspec.json.decode(path.read_bytes()[: 1 << 20], type=_Declared)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path} cannot be used: {str(error)[:200]}", hint="download the model again") from error
    if declared.auto_map is not None:
        raise ModelError(
            f"{path} wants to run code that comes with the model, which is never done",
            hint="choose a model whose architecture is transformers' own",
        )
    if declared.quantization_config is not None:
        raise ModelError(
            f"{path} says that the weights are quantised; float32, bfloat16 and float16 are read",
            hint="download the model in its original format",
        )


def _padded(rows: Sequence[Sequence[int]], device: torch.device, *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens and mask, int64[B, longest]."""
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    tokens = [[*pad, *row] if left else [*row, *pad] for pad, row in zip(pads, rows, strict=True)]
    mask = [[*pad, *[1] * len(row)] if left else [*[1] * len(row), *pad] for pad, row in zip(pads, rows, strict=True)]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)
