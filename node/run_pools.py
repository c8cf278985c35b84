"""The pools that a recipe names, as an operator sets them up: checked, named in the manifest, laid beside the policy.

Files lie where `[environment] pools` says, relative to the working directory, as `model.source` does. Never imports
torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from environments.base import Environment, Task
from protocol.atomic import write_atomically
from protocol.errors import ConfigError, MalformedError
from protocol.pools import check_pool, decode_pool, pool_file_name, read_pool_file
from protocol.records import EnvironmentSpec, LengthSpec, PoolSpec
from trainer.recipe import PoolChoice, Recipe

_SAMPLE_SEED: Final = bytes(32)


def load_pools(recipe: Recipe, environment: Environment) -> tuple[PoolSpec, ...]:
    """What the manifest says of a recipe's pools. Raises ConfigError for a file that is no pool of this environment."""
    return tuple(_spec(choice, environment) for choice in recipe.environment.pools)


def _spec(choice: PoolChoice, environment: Environment) -> PoolSpec:
    data = _read(Path(choice.file))
    try:
        pool = decode_pool(data)
    except MalformedError as error:
        raise ConfigError(f"the pool {choice.file} cannot be used: {error.message}", hint=_make(environment)) from error
    spec = PoolSpec(sha256=hashlib.sha256(data).digest(), count=len(pool), from_step=choice.from_step)
    try:
        check_pool(data, spec, environment=environment.digest)
    except MalformedError as error:
        raise ConfigError(
            f"the pool {choice.file} was made for another environment, or for {environment.name} with other "
            f"parameters, data or version: {error.message}",
            hint=_make(environment),
        ) from error
    return spec


def _make(environment: Environment) -> str:
    return f"make it again: intellect-node data filter --env {environment.name} --model MODEL --prompts N --out FILE"


def _read(path: Path) -> bytes:
    try:
        return read_pool_file(path)
    except OSError as error:
        raise ConfigError(
            f"the pool {path} cannot be read: {error.strerror}",
            hint="make it with `intellect-node data filter`, or correct environment.pools in the recipe",
        ) from error
    except MalformedError as error:
        raise ConfigError(error.message) from error


def lay_out_pools(recipe: Recipe, environment: EnvironmentSpec, policy_dir: Path) -> None:
    """Put the pools that a manifest names among the files of the first policy. Raises ConfigError."""
    for choice, spec in zip(recipe.environment.pools, environment.pools, strict=True):
        data = _read(Path(choice.file))
        if hashlib.sha256(data).digest() != spec.sha256:
            raise ConfigError(f"the pool {choice.file} was changed while the run was being made", hint="try again")
        write_atomically(policy_dir / pool_file_name(spec), data)


def check_targets(length: LengthSpec | None, environment: Environment) -> None:
    """Have an environment put every target of a recipe into a prompt. Raises ConfigError for one that it cannot say."""
    if length is None:
        return
    task: Task = environment.task(_SAMPLE_SEED)
    for target in length.targets:
        environment.with_length_target(task, target)
