"""How many sequences this machine decodes together: measured once, remembered in a file, lowered if memory ran out.

Bigger batches give more tokens a second until the processor is busy; from there on they only take memory. What was
found is kept by model architecture, device, number format, threads and memory limit. Leaves out the memory of one
batch, which the engine reckons from its sequences' lengths (node.engines.torch_engine).
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from node.engines.base import Engine, GenerationRequest, SamplingParams
from node.engines.memory import resident_bytes
from protocol.atomic import write_atomically
from protocol.errors import ModelError

BATCHES: Final = (8, 32, 128, 512)
_WORTHWHILE: Final = 1.1
"""A batch four times as large must bring at least so many times the tokens a second."""
_BUDGET_S: Final = 8.0
"""No larger batch is tried once measuring has taken so long, or would."""
_SHORT_S: Final = 0.2
_REPEATS: Final = 3
_PROMPT_TOKENS: Final = 16
_NEW_TOKENS: Final = 12
_MAX_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


class Capacity(Struct, frozen=True, forbid_unknown_fields=True):
    """What one setting of the engine was found to do."""

    batch: Annotated[int, Meta(ge=1, le=1 << 16)]
    tokens_per_s: Annotated[float, Meta(ge=0)]
    resident_bytes: Annotated[int, Meta(ge=0)]
    """Of this process, when it had been measured."""
    out_of_memory: Annotated[int, Meta(ge=0)] = 0
    """How often memory ran out since."""


class Fitted:
    """An engine that is kept to what this machine was found to do, as long as it is told when a policy was loaded."""

    def __init__(self, engine: Engine, path: Path | None, *, setting: str = "") -> None:
        """`path` is the file to remember in, None to neither measure nor remember; `setting` is a part of its keys.

        A file that cannot be read is begun anew: everything in it can be measured again.
        """
        self.engine = engine
        self._path = path
        self._setting = setting
        self._key = ""

    def loaded(self, model_dir: Path, *, ran_out: bool = False) -> None:
        """Set the engine, which holds the policy in `model_dir`, to the batch that suits it; measured at first.

        `ran_out` says that this process's predecessor died of memory, so that a smaller batch is taken from now on.
        Raises ModelError where not even a small one works.
        """
        if self._path is None:
            return
        key = self._key_of(model_dir)
        if key == self._key:
            return
        known = self._read(self._path)
        if ran_out:  # perhaps while it was measured
            least = Capacity(batch=BATCHES[0], tokens_per_s=0.0, resident_bytes=0)
            known[key] = _lowered(known.get(key, least), known.get(key, least).batch // 2)
        elif key not in known:
            known[key] = measure(self.engine)
        self._write(self._path, known)
        self._key, self.engine.max_batch = key, known[key].batch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remember it when the engine runs out of memory in the block."""
        before = self.engine.max_batch
        try:
            yield
        finally:
            if self._path is not None and self.engine.max_batch < before:
                known = self._read(self._path)
                if self._key in known:
                    known[self._key] = _lowered(known[self._key], self.engine.max_batch)
                    self._write(self._path, known)

    def _key_of(self, model_dir: Path) -> str:
        info = self.engine.info
        architecture = hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()[:16]
        return f"{info.name} {architecture} {info.device} {info.dtype} {self._setting}".strip()

    def _read(self, path: Path) -> dict[str, Capacity]:
        try:
            with path.open("rb") as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=dict[str, Capacity])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            _log.warning("capacity path=%s error=%r measured_again=True", path, str(error)[:200])
            return {}

    def _write(self, path: Path, known: dict[str, Capacity]) -> None:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(known), indent=2))


def fitted_from_environment(engine: Engine) -> Fitted:
    """As a compute process is told: INTELLECT_CAPACITY_FILE, and the settings that the result depends on."""
    text = os.environ.get("INTELLECT_CAPACITY_FILE", "")
    names = ("THREADS", "MAX_MEMORY_BYTES")
    setting = " ".join(f"{name.lower()}={os.environ.get(f'INTELLECT_{name}', '0')}" for name in names)
    return Fitted(engine, Path(text) if text else None, setting=setting)


def _lowered(capacity: Capacity, batch: int) -> Capacity:
    return msgspec.structs.replace(capacity, batch=max(1, batch), out_of_memory=capacity.out_of_memory + 1)


def measure(engine: Engine) -> Capacity:
    """Try batches of rising size until they bring no more. Raises ModelError where the smallest does not work."""
    began, before = time.monotonic(), engine.max_batch
    _speed(engine, 1)  # the first call of all is slower
    best: tuple[int, float] | None = None
    for batch in BATCHES:
        started = time.monotonic()
        speed = _speed(engine, batch)
        took_s = time.monotonic() - started
        if took_s < _SHORT_S:  # other work disturbs short ones
            speed = max(speed, *(_speed(engine, batch) for _ in range(_REPEATS)))
        if engine.max_batch < batch:  # memory ran out, and the engine found what fits
            best = best or (engine.max_batch, speed)
            break
        if best is not None and speed < _WORTHWHILE * best[1]:
            break
        best = batch, speed
        if time.monotonic() - began + BATCHES[1] // BATCHES[0] * took_s > _BUDGET_S:
            break
    engine.max_batch = before
    if best is None:
        raise ModelError("this machine's speed could not be measured")
    found = Capacity(batch=best[0], tokens_per_s=round(best[1], 1), resident_bytes=resident_bytes())
    _log.info("capacity batch=%d tokens_per_s=%.1f", found.batch, found.tokens_per_s)
    return found


def _speed(engine: Engine, batch: int) -> float:
    """Tokens a second of one batch of short answers to different prompts."""
    vocab_size, room = engine.info.vocab_size, engine.info.max_model_len
    prompt_tokens = max(1, min(_PROMPT_TOKENS, room - _NEW_TOKENS))
    requests = [
        GenerationRequest([(row + place) % vocab_size for place in range(prompt_tokens)], row.to_bytes(32))
        for row in range(batch)
    ]
    new_tokens = max(1, min(_NEW_TOKENS, room - prompt_tokens))
    engine.max_batch = batch
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, stop_ids=(), top_k_proof=0)
    started = time.monotonic()
    engine.generate(requests, sampling)
    return batch * new_tokens / (time.monotonic() - started)
