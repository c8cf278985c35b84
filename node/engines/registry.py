"""The engines by name, and how a compute process is told which one to run.

An engine's module is imported when it is asked for; where a library of an extra is missing, the error names the extra.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from node.engines.base import Engine
from protocol.errors import ConfigError, ModelError


class _Entry(NamedTuple):
    module: str
    factory: str
    extra: str
    """What installs the library that it needs beside the project's own."""


ENGINES: Final = {
    "torch": _Entry("node.engines.torch_engine", "TorchEngine", ""),
    "transformers": _Entry("node.engines.torch_engine", "transformers_engine", ""),
    "vllm": _Entry("node.engines.vllm_engine", "VllmEngine", "vllm"),
}


def engine_factory(name: str) -> Callable[..., Engine]:
    """What makes an engine from dtype, device, max_batch and max_memory_bytes.

    Raises ConfigError for an unknown name, ModelError where what the engine needs is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name[:40]!r}", hint=f"known: {', '.join(ENGINES)}")
    entry = ENGINES[name]
    try:
        factory: Callable[..., Engine] = getattr(importlib.import_module(entry.module), entry.factory)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the engine {name} is not installed: there is no module {error.name}",
            hint=f"pip install 'intellect-node[{entry.extra}]', or start with --engine torch",
        ) from error
    return factory


def engine_from_environment(*, engine: str | None = None) -> Engine:
    """The engine that a compute process is told to run, unless the caller knows: see `engine_settings`."""
    threads = int(os.environ.get("INTELLECT_THREADS", "1"))
    if threads:
        import torch

        torch.set_num_threads(threads)
    return engine_factory(engine or os.environ.get("INTELLECT_ENGINE", "torch"))(**_options())


def _options() -> dict[str, Any]:
    return {
        "dtype": os.environ.get("INTELLECT_DTYPE", "float32"),
        "device": os.environ.get("INTELLECT_DEVICE", "cpu"),
        "max_memory_bytes": int(os.environ.get("INTELLECT_MAX_MEMORY_BYTES", "0")),
    }
