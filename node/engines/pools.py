"""The pools of a run, as they lie beside a policy: read once in a process, whatever policy brought them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from protocol.errors import ModelError, ProtocolError
from protocol.pools import Pool, active_pool, check_pool, pool_file_name, read_pool_file
from protocol.records import EnvironmentSpec, PoolSpec

MAX_HELD: Final = 2
"""Steps alternate between two pools where one takes over from another."""

_held: dict[bytes, Pool] = {}


def task_seed(environment: EnvironmentSpec, policy_dir: Path, *, prompt: bytes, step: int) -> bytes:
    """The seed of a prompt's task: drawn from the step's pool, or the prompt's own where the step has none.

    `prompt` is protocol.seeds.prompt_seed. Raises ModelError where the pool is missing or is another one.
    """
    spec = active_pool(environment, step)
    if spec is None:
        return prompt
    if spec.sha256 not in _held:
        pool = _read(policy_dir / pool_file_name(spec), spec, environment.digest)
        while len(_held) >= MAX_HELD:
            del _held[next(iter(_held))]
        _held[spec.sha256] = pool
    return _held[spec.sha256].draw(prompt)


def _read(path: Path, spec: PoolSpec, environment: bytes) -> Pool:
    try:
        return check_pool(read_pool_file(path), spec, environment=environment)
    except (OSError, ProtocolError) as error:
        raise ModelError(
            f"the pool {path} cannot be used: {getattr(error, 'message', None) or error}",
            hint="remove the checkpoint from the data directory and let the node fetch it again",
        ) from error
