"""What vLLM is started with: devices, memory for keys and values, and the environment that it reads at import.

On a CPU the memory is reckoned here, from the model's sizes; on a GPU vLLM measures what a pass takes. All that differs
between the two is in this module and in node.engines.memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from node.engines.memory import free_bytes
from node.engines.vllm_worker import EXTENSION
from protocol.errors import ConfigError, ModelError

MOST_SEQUENCES: Final = 512
"""Answers under way together, the largest batch that is tried (node.engines.capacity)."""
_BLOCK_TOKENS: Final = 32
"""A shorter beginning of a prompt is not shared; vLLM's kernels for CPUs want a multiple of this."""
_LIMITED_SHARE: Final = 0.75
_FREE_SHARE: Final = 0.25
"""Of the memory that is left beside the weights, for keys and values, with --max-memory and without. It stays taken."""
_DEVICE_SHARE: Final = 0.9
_WEIGHTS_COPIES: Final = 1.3
"""The embedding is held twice where it is the output projection too."""
_LEAST_TOKENS: Final = 256
_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process, where its workers can be asked
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # node.engines.vllm_private knows the first one
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines on one machine would all take the first cores
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Settings:
    """What a vLLM engine is asked for."""

    dtype: str
    device: str
    max_memory_bytes: int
    tensor_parallel: int

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def devices(self) -> str:
        """For people, and for what is remembered of this machine."""
        return self.device if self.tensor_parallel == 1 else f"{self.device} × {self.tensor_parallel}"


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    weights_bytes: int
    token_bytes: int
    """Of one position's keys and values."""
    max_model_len: int


def prepare_environment(settings: Settings) -> None:
    """Set what vLLM and CUDA read once. Raises ConfigError where they were initialised for other devices."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns about what is meant so
    if settings.on_cpu:
        return
    devices = visible_devices(
        settings.device, count=settings.tensor_parallel, allowed=os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialised and os.environ.get("CUDA_VISIBLE_DEVICES") != devices:
        raise ConfigError(f"CUDA was initialised before vLLM could choose {settings.device}")
    os.environ["CUDA_VISIBLE_DEVICES"] = devices


def visible_devices(device: str, *, count: int, allowed: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for `count` devices from cuda:<n> on, of those in `allowed` (None: all)."""
    first = int(device.partition(":")[2] or 0)
    numbers = range(first, first + count)
    if allowed is None:
        return ",".join(map(str, numbers))
    names = [name for name in allowed.split(",") if name]
    if numbers[-1] >= len(names):
        raise ConfigError(
            f"{count} devices from {device} on do not exist: CUDA_VISIBLE_DEVICES={allowed} names {len(names)}",
            hint="give another --device or a smaller --tensor-parallel",
        )
    return ",".join(names[number] for number in numbers)


def engine_arguments(model_dir: Path, settings: Settings, sizes: Sizes) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs. Raises ModelError where nothing is left to compute in."""
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": settings.dtype,
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's: it would add stop tokens
        "max_model_len": -1,  # the model's, or what the memory holds
        "max_num_seqs": MOST_SEQUENCES,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "seed": 0,
    }
    if settings.on_cpu:
        return arguments | {
            "enforce_eager": True,  # compiling takes a minute of every start
            "block_size": _BLOCK_TOKENS,
            "kv_cache_memory_bytes": _cache_bytes(model_dir, settings, sizes),
        }
    return arguments | {"gpu_memory_utilization": _device_share(settings)}


def _cache_bytes(model_dir: Path, settings: Settings, sizes: Sizes) -> int:
    limit = settings.max_memory_bytes
    room = free_bytes(torch.device("cpu"), limit=limit) - int(_WEIGHTS_COPIES * sizes.weights_bytes)
    share = int((_LIMITED_SHARE if limit else _FREE_SHARE) * room)
    if share < _LEAST_TOKENS * sizes.token_bytes:
        raise ModelError(
            f"the policy in {model_dir} leaves {max(0, room) >> 20} MiB of memory to compute in",
            hint="allow more with --max-memory, use a device that has more, or join a run of a smaller model",
        )
    blocks_in_full = MOST_SEQUENCES * -(-sizes.max_model_len // _BLOCK_TOKENS) + 1
    return min(share, blocks_in_full * _BLOCK_TOKENS * sizes.token_bytes)


def _device_share(settings: Settings) -> float:
    """Of the device's memory, for everything."""
    free, total = torch.cuda.mem_get_info()
    wanted = min(settings.max_memory_bytes or total, int(_DEVICE_SHARE * free))
    return round(wanted / total, 4)
