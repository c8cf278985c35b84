"""What a recipe says about who may contribute and what work earns, as the manifest has it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from protocol.errors import ConfigError, MalformedError, ModelError
from protocol.identity import PeerId
from protocol.records import AdmissionSpec, CreditSpec
from protocol.tensorfile import PREFIX_BYTES, check_header, header_length
from trainer.recipe import OPEN_WORK_BITS, Recipe


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...] | None = None
    """None in the file's metadata, which lies among the tensors."""


def admission_spec(recipe: Recipe) -> AdmissionSpec:
    """Raises ConfigError when an allowed peer id is none, or is named twice."""
    choice = recipe.admission
    try:
        allowed = tuple(PeerId.parse(text).public_key for text in choice.allowed)
    except MalformedError as error:
        raise ConfigError(
            f"admission.allowed: {error.message}", hint="`intellect-node id` prints the peer id of a node"
        ) from error
    if len(set(allowed)) != len(allowed):
        raise ConfigError("admission.allowed: a peer id is named twice")
    return AdmissionSpec(kind=choice.kind, allowed=allowed, work_bits=choice.asked_bits)


def admission_warning(spec: AdmissionSpec) -> str:
    """What an operator should know of a run that anybody can enter at no cost; empty for every other run."""
    if spec.is_asked_for:
        return ""
    return (
        "warning: this run is open, and its recipe says admission.work_bits = 0: a new key costs nothing, so whoever "
        f"is evicted comes back at once under another one. Leave work_bits out (it is {OPEN_WORK_BITS} then: some ten "
        'seconds of one core for each new key), raise it, or write kind = "invite"; it cannot be changed afterwards'
    )


def credit_spec(recipe: Recipe, model_dir: Path) -> CreditSpec:
    """Raises ModelError when the model's size is needed and cannot be told."""
    choice = recipe.credits
    parameters = count_parameters(model_dir) if choice.unit == "flops" else 0
    return CreditSpec(unit=choice.unit, parameters=parameters, maturity_steps=choice.maturity_steps)


def count_parameters(model_dir: Path) -> int:
    """Numbers in all tensors of a model directory's safetensors files. Raises ModelError."""
    return sum(_numbers_in(path) for path in sorted(model_dir.glob("*.safetensors")))


def _numbers_in(path: Path) -> int:
    try:
        with path.open("rb") as file:
            length = header_length(file.read(PREFIX_BYTES), path.stat().st_size)
            header = file.read(length)
        check_header(header, path.stat().st_size - PREFIX_BYTES - length)
    except (OSError, MalformedError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="download the model again") from error
    tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    return sum(math.prod(each.shape) for each in tensors.values() if each.shape is not None)
