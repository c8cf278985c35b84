"""The policy as the trainer holds it: a causal language model, its weights on disk, and token log-probabilities.

Reads any transformers-format directory: safetensors only, no code from the model's repository. Weights are float32 in
memory, whatever they are on disk. Never compiled: the paper saw runs collapse under torch.compile (section 3.5).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from protocol.errors import ModelError
from trainer.attention import NAME, watched
from trainer.head import PIECE_ELEMENTS, Job, PiecewiseHead
from trainer.packing import Laid, Pair, lay_out
from trainer.parallel import ALONE, World, gather, recompute_layers, reshard
from trainer.positions import most_positions
from trainer.recipe import PolicySettings
from trainer.sharded import load_sharded

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
_PROBE_TOLERANCE: Final = {"float32": 1e-2, "bfloat16": 0.15}
"""Log-probabilities of float32 passes agree to 1e-5, of bfloat16 to some hundredths; tokens that see their neighbours
differ by tenths at least."""


class Policy:
    """A model, where it runs, and how it is computed and published."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str = "cpu",
        settings: PolicySettings | None = None,
        world: World = ALONE,
    ) -> None:
        """`world`: the processes that the model is spread over."""
        self.model = model
        self.device = device
        self.settings = settings or PolicySettings()
        self.world = world
        self.packs = False
        """Whether micro-batches may be packed."""
        self.piece_elements = PIECE_ELEMENTS
        self._head: PiecewiseHead | None = None
        self._prepared = False

    def score(self, laid: Laid, temperature: float, *, with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probabilities of a micro-batch's answer tokens and entropies of what they were drawn from, both [N].

        Entropies carry a gradient only if `with_entropy`; they are always computed.
        """
        if self._head is not None and laid.targets.numel() * self.vocab_size > self.piece_elements:
            piece = max(1, self.piece_elements // self.vocab_size)
            self._head.job = Job(laid.rows, laid.targets, temperature, with_entropy, piece)
            try:
                scores = self._forward(laid)
                return scores[:, 0], scores[:, 1]
            finally:
                self._head.job = None
        logits = self._forward(laid).float()
        distribution = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        logprobs = distribution.flatten().index_select(0, laid.rows * distribution.shape[-1] + laid.targets)
        source = distribution if with_entropy else distribution.detach()
        return logprobs, -(source.exp() * source).sum(-1).index_select(0, laid.rows)

    def _forward(self, laid: Laid) -> Tensor:
        """What the model says where it is asked to, [B · U, V] logits unless the head has a job."""
        arguments: dict[str, Any] = {"use_cache": False, "logits_to_keep": laid.keep}
        if laid.attention is not None:
            arguments |= {"position_ids": laid.positions, "attention_plan": laid.attention}
        coarse = self.settings.compute == "bfloat16"
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=coarse):
            logits: Tensor = self.model(input_ids=laid.inputs, **arguments).logits
        return logits.flatten(0, 1)

    def prepare(self) -> None:
        """Make ready for training: packing, the output layer in pieces, recomputation. A second call does nothing.

        Collective where the policy is sharded. Raises ModelError where the settings ask for what the model cannot do.
        """
        if self._prepared:
            return
        self._prepared = True
        if self.settings.layout != "padded":
            try:
                self._pack()
            except ModelError as error:
                if self.settings.layout != "auto":
                    raise
                logger.warning("layout=padded reason=%r", error.message)
        self._cut_head()
        if self.settings.activation_checkpointing:
            recompute_layers(self.model)
        if self.world.size > 1:
            reshard(self.model)

    def _pack(self) -> None:
        """Attend by plans from now on, once a probe has shown that this model keeps packed answers apart.

        Raises ModelError for a model that mixes them: one that computes along the row by other means than attention,
        or whose attention has more to it than transformers' interface says.
        """
        probe = _probe_pairs(self.vocab_size)
        with torch.no_grad(), watched() as calls:
            apart = _by_answer(self, lay_out(probe, "padded", max_tokens=1, device=self.device))
            before = self.model.config._attn_implementation  # type: ignore[union-attr]
            try:
                self.model.set_attn_implementation(NAME)  # type: ignore[operator]
                together = _by_answer(self, lay_out(probe, "shared", max_tokens=1000, device=self.device))
                error = float((apart - together).abs().max())
            except (TypeError, ValueError, NotImplementedError) as failure:
                error, reason = math.inf, str(failure)[:200]
            else:
                reason = f"log-probabilities change by {error:.2g}"
            # A fresh model may hardly look at other tokens: that they stay apart must follow from who attends, too.
            if self.model.config._attn_implementation != NAME or calls() < self._layers:  # type: ignore[union-attr]
                error, reason = math.inf, f"{calls()} of {self._layers} layers attend as they are told"
        if not error <= self._probe_tolerance:
            self.model.set_attn_implementation(before)  # type: ignore[operator]
            raise ModelError(
                f"this model cannot be trained on packed rollouts: {reason}",
                hint='set policy.layout = "padded" in the recipe',
            )
        self.packs = True

    def _cut_head(self) -> None:
        """Have the output layer work in pieces where logits are many, unless the model does something to them after."""
        layer = self.model.get_output_embeddings()  # type: ignore[operator]
        if layer is None:
            return
        probe = lay_out(_probe_pairs(self.vocab_size), "padded", max_tokens=1000, device=self.device)
        with torch.no_grad():
            whole = _by_answer(self, probe)
            self._head, self.piece_elements = PiecewiseHead(layer), 2 * self.vocab_size
            try:
                same = torch.allclose(_by_answer(self, probe), whole, atol=self._probe_tolerance)
            except (RuntimeError, TypeError, ValueError):
                same = False
        self.piece_elements = PIECE_ELEMENTS
        if not same:
            self._head.remove()
            self._head = None
            logger.warning("logits=whole reason=%r", "the model changes logits after its output layer")

    @property
    def _probe_tolerance(self) -> float:
        return _PROBE_TOLERANCE[self.settings.compute]

    @property
    def _layers(self) -> int:
        """Blocks of the decoder, each of which attends once."""
        return int(getattr(self.model.config, "num_hidden_layers", 1))

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    @cached_property
    def max_length(self) -> int:
        """Most positions that the model has. Raises ModelError where its configuration does not say."""
        return most_positions(self.model.config.to_dict(), origin="the policy's config.json")  # type: ignore[union-attr, operator]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name; a tied one appears once, under its first name."""
        return dict(self.model.named_parameters())

    def tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        """What is published: weights in their number format and buffers, whole and on the CPU.

        A collective call where the policy is sharded; nothing in a process that does not `keep` them.
        """
        dtype = getattr(torch, self.settings.dtype)
        every = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self.model.state_dict().items() if name not in every}
        return gather(self.parameters(), keep=keep, dtype=dtype) | gather(buffers, keep=keep)


def _probe_pairs(vocab_size: int) -> list[Pair]:
    """Two answers to one prompt, and an answer to another."""
    token = [number % vocab_size for number in range(3, 23)]
    return [(token[:4], token[4:8]), (token[:4], token[8:13]), (token[13:16], token[16:20])]


def _by_answer(policy: Policy, micro_batches: Sequence[Laid]) -> Tensor:
    """Log-probabilities of all answers, in the order of the caller's list."""
    found = {}
    for laid in micro_batches:
        logprobs = policy.score(laid, 1.0)[0]
        found.update({member: logprobs[laid.owner == number] for number, member in enumerate(laid.members)})
    return torch.cat([found[member] for member in sorted(found)])


def build_policy(config: dict[str, Any]) -> nn.Module:
    """A model with fresh weights from the fields of a config.json, drawn from torch's global generator."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), trust_remote_code=False
    )
    return _typed(model.float())


def load_policy(
    model_dir: Path, *, device: str = "cpu", settings: PolicySettings | None = None, world: World = ALONE
) -> Policy:
    """Load a transformers-format directory in float32, each process its share. Raises ModelError, also when weights
    are missing.
    """
    if not model_dir.is_dir():
        raise ModelError(f"there is no model directory {model_dir}")
    settings = settings or PolicySettings()
    if world.size == 1:
        model = _load_whole(model_dir).to(device)
    else:
        with _reading(model_dir):
            model = load_sharded(
                model_dir, world, device=device, compute=settings.compute, load_whole=lambda: _load_whole(model_dir)
            )
    return Policy(model.eval(), device=device, settings=settings, world=world)


def _load_whole(model_dir: Path) -> nn.Module:
    """All of a model on the CPU, in memory of its own."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with _reading(model_dir):
        model, found = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    if found["missing_keys"]:
        raise ModelError(f"the model in {model_dir} lacks the weights {', '.join(sorted(found['missing_keys'])[:3])}")
    return _typed(_own_memory(model))


@contextmanager
def _reading(model_dir: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"the model in {model_dir} cannot be loaded: {str(error)[:300]}",
            hint="it must hold config.json and *.safetensors of a causal language model that transformers knows",
        ) from error


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's weights in float32, tied ones once."""
    write_weights(Policy(model).tensors(), path)


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write what `Policy.tensors` gave: equal weights give equal bytes."""
    save_file(tensors, path, metadata={"format": "pt"})
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
