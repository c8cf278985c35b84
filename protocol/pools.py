"""Pools: files of task seeds that a run's prompts are drawn from, and a curriculum made of them.

A pool is what the offline filter keeps (INTELLECT-2, section 4.1): tasks that the first policy sometimes solves. It
names an environment by its digest and tasks by their seeds, so it needs no environment to be read. Big-endian:

    "IPP1", samples u8, count u32, environment digest (32), count seeds (32 each), count solved u8

`solved` is how many of `samples` answers to each task were right. A prompt's task is the seed at
SeedStream(H("pool", prompt seed)).below(count). Leaves out how pools are made (node.data_filter).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.constants import MAX_POOL_TASKS
from protocol.errors import ChecksumError, MalformedError
from protocol.records import EnvironmentSpec, PoolSpec
from protocol.seeds import SEED_BYTES, SeedStream, pool_seed

MAX_SAMPLES: Final = 255
_HEADER: Final = struct.Struct(">4sBI32s")
_MAGIC: Final = b"IPP1"
_TASK_BYTES: Final = SEED_BYTES + 1
MAX_POOL_BYTES: Final = _HEADER.size + MAX_POOL_TASKS * _TASK_BYTES


@dataclass(frozen=True)
class Pool:
    """Tasks of one environment. `seeds` are laid end to end; `solved` has a byte for each."""

    environment: bytes
    samples: int
    seeds: bytes
    solved: bytes

    def __len__(self) -> int:
        return len(self.solved)

    def seed(self, place: int) -> bytes:
        """The task seed at a place."""
        return self.seeds[place * SEED_BYTES : (place + 1) * SEED_BYTES]

    def draw(self, prompt: bytes) -> bytes:
        """The task seed of the prompt of a seed (protocol.seeds.prompt_seed)."""
        return self.seed(SeedStream(pool_seed(prompt)).below(len(self)))


def encode_pool(environment: bytes, *, samples: int, tasks: Sequence[tuple[bytes, int]]) -> bytes:
    """The file of (seed, solved) tasks. Raises MalformedError for what `decode_pool` would refuse."""
    try:
        header = _HEADER.pack(_MAGIC, samples, len(tasks), environment)
        data = header + b"".join(seed for seed, _ in tasks) + bytes(solved for _, solved in tasks)
    except (struct.error, ValueError) as error:
        raise MalformedError(f"this is no pool: {error}") from error
    decode_pool(data)
    return data


def decode_pool(data: bytes) -> Pool:
    """Read a pool file. Any bytes give a pool or MalformedError, in time and memory bounded by their length."""
    if not data.startswith(_MAGIC):
        raise MalformedError("not a pool file: it does not begin with IPP1")
    if len(data) < _HEADER.size:
        raise MalformedError(f"the pool file is truncated: {len(data)} bytes, less than its header")
    _, samples, count, environment = _HEADER.unpack_from(data)
    if not 1 <= count <= MAX_POOL_TASKS or not samples:
        raise MalformedError(f"a pool of {count} tasks and {samples} samples; 1 to {MAX_POOL_TASKS} tasks are allowed")
    if len(data) != (expected := _HEADER.size + count * _TASK_BYTES):
        kind = "truncated" if len(data) < expected else "too long"
        raise MalformedError(f"the pool file is {kind}: {len(data)} bytes, and {count} tasks take {expected}")
    seeds, solved = data[_HEADER.size : -count], data[-count:]
    if max(solved) > samples:
        raise MalformedError(f"the pool file says that a task was solved {max(solved)} times in {samples}")
    return Pool(environment, samples, seeds, solved)


def read_pool_file(path: Path) -> bytes:
    """A file's bytes if they may be a pool's. Raises OSError, or MalformedError for more than a pool can have."""
    with path.open("rb") as file:
        data = file.read(MAX_POOL_BYTES + 1)
    if len(data) > MAX_POOL_BYTES:
        raise MalformedError(f"{path} is larger than {MAX_POOL_BYTES} bytes, which no pool is")
    return data


def check_pool(data: bytes, spec: PoolSpec, *, environment: bytes) -> Pool:
    """The pool that a manifest means. Raises ChecksumError for other bytes, MalformedError for another pool."""
    if hashlib.sha256(data).digest() != spec.sha256:
        raise ChecksumError(f"the pool file does not have the hash {spec.sha256.hex()[:16]} that the manifest gives")
    pool = decode_pool(data)
    if len(pool) != spec.count:
        raise MalformedError(f"the pool has {len(pool)} tasks; the manifest says {spec.count}")
    if pool.environment != environment:
        raise MalformedError(
            f"the pool is of the environment {pool.environment.hex()[:16]}, not of {environment.hex()[:16]}"
        )
    return pool


def pool_file_name(spec: PoolSpec) -> str:
    """What a pool's file is called beside a policy's."""
    return f"pool-{spec.sha256.hex()[:16]}.bin"


def active_pool(environment: EnvironmentSpec, step: int) -> PoolSpec | None:
    """The pool that a step's prompts are drawn from; None while that is the whole environment."""
    return next((pool for pool in reversed(environment.pools) if pool.from_step <= step), None)
