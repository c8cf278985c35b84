"""The policy as the trainer holds it: a causal language model, its weights on disk, and token log-probabilities.

Reads any transformers-format directory: safetensors only, no code from the model's repository, no compilation,
float32. Attention needs no mask, because batches are padded on the right and attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from protocol.errors import ModelError

WEIGHTS_FILE = "model.safetensors"
_PADDING_SHARE = 0.4
"""Most padding in a row: a longer sequence begins the next micro-batch."""


@dataclass(frozen=True)
class TokenBatch:
    """Sequences padded on the right. `W` columns reach from the earliest first output token to the last one."""

    inputs: Tensor
    """[B, T−1] token ids that the model reads."""
    targets: Tensor
    """[B, W] token ids that it should predict."""
    mask: Tensor
    """[B, W] 1 on output tokens, 0 on prompt and padding."""
    first: int
    """Position of the first column in the sequence."""

    @property
    def width(self) -> int:
        return self.targets.shape[1]

    def align(self, values: Sequence[Sequence[float]]) -> Tensor:
        """[B, W] per-token values of the output tokens, zero elsewhere."""
        aligned = torch.zeros_like(self.mask)
        aligned[self.mask.bool()] = torch.tensor(
            [value for row in values for value in row], dtype=aligned.dtype, device=aligned.device
        )
        return aligned


def pack_batch(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], *, device: str = "cpu"
) -> TokenBatch:
    """Lay prompts and their outputs into one batch. Every prompt and every output has a token at least."""
    rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, rows))
    first = min(map(len, prompts))
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        mask[index, len(prompt) : len(row)] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    return TokenBatch(tokens[:, :-1], tokens[:, first:], mask[:, first:], first)


def micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices by rising length, cut where a micro-batch would exceed `max_tokens` or be padded much.

    A single sequence longer than `max_tokens` gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        length = lengths[index]
        current = batches[-1] if batches else []
        fits = current and (len(current) + 1) * length <= max_tokens
        if fits and lengths[current[0]] >= (1 - _PADDING_SHARE) * length:
            current.append(index)
        else:
            batches.append([index])
    return batches


class Policy:
    """A model, where it runs, and the directory it came from."""

    def __init__(self, model: nn.Module, *, device: str = "cpu") -> None:
        self.model = model
        self.device = device

    def score(self, batch: TokenBatch, temperature: float, *, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets and entropies of the distributions at `temperature`, both [B, W].

        Entropies carry a gradient only if `with_entropy`; they are always computed.
        """
        output = self.model(input_ids=batch.inputs, use_cache=False, logits_to_keep=batch.width)
        distribution = (output.logits.float() / temperature).log_softmax(-1)
        logprobs = distribution.gather(-1, batch.targets[..., None])[..., 0]
        source = distribution if with_entropy else distribution.detach()
        return logprobs, -(source.exp() * source).sum(-1)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name; a tied one appears once, under its first name."""
        return dict(self.model.named_parameters())


def build_policy(config: dict[str, Any]) -> nn.Module:
    """A model with fresh weights from the fields of a config.json, drawn from torch's global generator."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), attn_implementation="sdpa", trust_remote_code=False
    )
    return _typed(model.float())


def load_policy(model_dir: Path, *, device: str = "cpu") -> Policy:
    """Load a transformers-format directory in float32. Raises ModelError, also when weights are missing."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if not model_dir.is_dir():
        raise ModelError(f"there is no model directory {model_dir}")
    disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"the model in {model_dir} cannot be loaded: {str(error)[:300]}",
            hint="it must hold config.json and *.safetensors of a causal language model that transformers knows",
        ) from error
    if found["missing_keys"]:
        raise ModelError(f"the model in {model_dir} lacks the weights {', '.join(sorted(found['missing_keys'])[:3])}")
    return Policy(_typed(_own_memory(model).to(device)).eval(), device=device)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's weights so that equal weights give equal bytes. Tied weights are written once."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    stored = {name: tensor.cpu().contiguous() for name, tensor in (tensors | buffers).items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _own_memory(model: nn.Module) -> nn.Module:
    # Weights mapped from a file may start at any address, and vector kernels may round by alignment: a policy that
    # was reloaded must compute bit for bit what the one that stayed in memory computes.
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model


def _typed(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError("transformers did not give a torch model")
    return model
