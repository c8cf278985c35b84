"""A policy over several processes from its first byte: each reads its share of the weights, and nobody reads it whole.

The model is laid out without memory (torch's meta device), spread (FSDP2), and each parameter's rows are read from the
safetensors files. A directory whose tensors are named or shaped otherwise than the model's, as transformers converts
them while it loads, is loaded whole by one process at a time. Leaves out how weights are gathered (trainer.parallel).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from protocol.errors import ModelError, NodeError
from trainer.parallel import World, shard
from trainer.recipe import Format
from trainer.stored import StoredTensors, rows_of, spread_like

logger = logging.getLogger(__name__)

_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"

Read = Callable[[Sequence[str], Tensor], Tensor]
"""Given a parameter's names, several where it is tied, and the parameter: its values, spread as it is."""


def load_sharded(
    model_dir: Path, world: World, *, device: str, compute: Format, load_whole: Callable[[], nn.Module]
) -> nn.Module:
    """A causal model in float32 whose parameters are spread over the processes; a collective call.

    `load_whole` gives all of it on the CPU. Raises OSError, ValueError and the like for what transformers cannot read,
    and what `load_whole` raises, in every process.
    """
    model = _outline(model_dir)
    shard(model, world, device=device, compute=compute)
    with StoredTensors(_weight_files(model_dir)) as stored:
        names = {id(held): every for every, held in _named(model)}
        if all(_stored_name(stored, names[id(held)], held) for held in model.parameters()):
            _fill(model, lambda every, held: stored.read_like(_stored_name(stored, every, held), held))
            _fill_buffers(model, stored, device)
            return model
    logger.info("weights=whole reason=%r", "they are stored otherwise than the model names them")
    _in_turn(world, lambda: _fill_from(model, load_whole(), device))
    return model


def _outline(model_dir: Path) -> nn.Module:
    """The model with its buffers, and parameters that have no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
    with _parameters_without_memory():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if not isinstance(model, nn.Module):
        raise ModelError("transformers did not give a torch model")
    return model.eval()


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Parameters go to the meta device as they are made, one after another; tied ones stay one."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # torch: or a parameter
    try:
        yield
    finally:
        hook.remove()


def _weight_files(model_dir: Path) -> list[Path]:
    """As transformers chooses them."""
    if (model_dir / _WEIGHTS).is_file() or not (model_dir / _INDEX).is_file():
        return [model_dir / _WEIGHTS]
    index = json.loads((model_dir / _INDEX).read_bytes())
    return [model_dir / name for name in sorted(set(index["weight_map"].values()))]


def _named(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Parameters, each with all of its names."""
    names: dict[int, list[str]] = {}
    for name, held in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(held), []).append(name)
    yield from ((names[id(held)], held) for held in model.parameters())


def _stored_name(stored: StoredTensors, names: Sequence[str], held: Tensor) -> str:
    """Under which of its names a parameter is stored, whole; empty if it is not."""
    return next((name for name in names if name in stored.names and stored.shape(name) == held.shape), "")


def _fill(model: nn.Module, read: Read) -> None:
    state: dict[str, nn.Parameter] = {}
    for names, held in list(_named(model)):
        filled = nn.Parameter(read(names, held), requires_grad=held.requires_grad)
        state |= dict.fromkeys(names, filled)
    model.load_state_dict(state, strict=False, assign=True)


def _fill_buffers(model: nn.Module, stored: StoredTensors, device: str) -> None:
    for name, buffer in model.named_buffers():
        if name in stored.names and stored.shape(name) == buffer.shape:
            buffer.copy_(stored.read(name))
        buffer.data = buffer.data.to(device)


def _fill_from(model: nn.Module, source: nn.Module, device: str) -> None:
    whole, buffers = dict(source.named_parameters(remove_duplicate=False)), dict(source.named_buffers())

    def share(names: Sequence[str], held: Tensor) -> Tensor:
        if not isinstance(held, DTensor):
            raise ModelError(f"the parameter {names[0]} was not spread over the processes")
        start, stop = rows_of(held)
        return spread_like(held, whole[names[0]].detach()[start:stop].clone().to(device))

    _fill(model, share)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(device)


def _in_turn(world: World, work: Callable[[], None]) -> None:
    """Have one process after another work. Raises in every process what one of them raised, or ModelError for it."""
    for turn in range(world.size):
        failure: NodeError | None = None
        if turn == world.rank:
            try:
                work()
            except NodeError as error:
                failure = error
        if world.sum(torch.tensor(float(failure is not None))):
            raise failure or ModelError(f"process {turn} of the trainer could not load the policy: see its log")
