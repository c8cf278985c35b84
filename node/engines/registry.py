"""The engines by name, and how a compute process is told which one to run.

An engine's module is imported when it is asked for, and a library of an extra only when the engine is made.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from node.engines.base import Engine
from protocol.errors import ConfigError


class _Entry(NamedTuple):
    module: str
    factory: str


ENGINES: Final = {
    "torch": _Entry("node.engines.torch_engine", "TorchEngine"),
    "transformers": _Entry("node.engines.torch_engine", "transformers_engine"),
    "vllm": _Entry("node.engines.vllm_engine", "VllmEngine"),
}


def engine_factory(name: str) -> Callable[..., Engine]:
    """What makes an engine from dtype, device, max_batch and max_memory_bytes.

    Raises ConfigError for an unknown name; making one raises ModelError where a library that it needs is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name[:40]!r}", hint=f"known: {', '.join(ENGINES)}")
    entry = ENGINES[name]
    factory: Callable[..., Engine] = getattr(importlib.import_module(entry.module), entry.factory)
    return factory


def engine_from_environment(*, engine: str | None = None) -> Engine:
    """The engine that a compute process is told to run, unless the caller knows: see `engine_settings`."""
    threads = int(os.environ.get("INTELLECT_THREADS", "1"))
    if threads:
        import torch

        torch.set_num_threads(threads)
    name = engine or os.environ.get("INTELLECT_ENGINE", "torch")
    return engine_factory(name)(**_options(name))


def _options(name: str) -> dict[str, Any]:
    shared = int(os.environ.get("INTELLECT_TENSOR_PARALLEL", "1"))
    if shared > 1 and name != "vllm":
        raise ConfigError(f"the engine {name} runs on one device, not on {shared}", hint="start with --engine vllm")
    return {
        "dtype": os.environ.get("INTELLECT_DTYPE", "float32"),
        "device": os.environ.get("INTELLECT_DEVICE", "cpu"),
        "max_memory_bytes": int(os.environ.get("INTELLECT_MAX_MEMORY_BYTES", "0")),
        **({"tensor_parallel": shared} if shared > 1 else {}),
    }
