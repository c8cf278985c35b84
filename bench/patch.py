"""Patches of a bf16 model after real AdamW steps: bytes against whole, raw and COO forms, and MB of model a second.

A random Qwen2-like model with fp32 master weights takes RL-like steps (advantage-weighted, clipped gradients). Once the
Adam moments are warm, its bf16 roundings 1, 2, 4 and 8 steps apart are cut in shards and patched. One process and core.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from bench.harness import Result
from protocol.errors import ChecksumError
from protocol.patch import STEPS, Run, apply_patch, make_patch, pack_shard, unpack_shard

if TYPE_CHECKING:
    import torch

U16 = npt.NDArray[np.uint16]

SHARD_BYTES: Final = 16 << 20
SPANS: Final = (1, 2, 4, 8)
RATES: Final = (1e-6, 3e-7)
ZSTD_LEVEL: Final = 1
VOCABULARY: Final = 32_000
BATCH: Final = (4, 24)
"""Sequences and tokens of a step: what a gradient needs to be dense, and no more."""


@dataclass(frozen=True)
class _Size:
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    warm_steps: int
    repeats: int


FULL: Final = _Size(hidden=640, layers=12, intermediate=2560, vocabulary=VOCABULARY, warm_steps=16, repeats=5)
QUICK: Final = _Size(hidden=64, layers=2, intermediate=256, vocabulary=2000, warm_steps=2, repeats=1)


def bench(*, quick: bool) -> Result:
    """Train at each learning rate; measure each span of steps."""
    size = QUICK if quick else FULL
    result = Result()
    for rate in RATES:
        result.figures |= _measured(size, rate)
    if not quick:  # a small model's weights move more
        result.at_least("lr1e-06_1step_ratio", 130)
    result.at_least("encode_mb_per_s", 500)
    result.at_least("decode_mb_per_s", 500)
    return result


def _measured(size: _Size, rate: float) -> dict[str, float]:
    warm, *later = _snapshots(size, rate)
    figures: dict[str, float] = {}
    for span, snapshot in zip(SPANS, later, strict=True):
        figures |= _sizes(f"lr{rate:g}_{span}step", warm, snapshot)
    if rate == RATES[0]:
        figures |= {"model_mb": warm.nbytes / 1e6} | _speeds(warm, later[0], size.repeats)
    return figures


# ------------------------------------------------------------------------------------------------------------- training


def _snapshots(size: _Size, rate: float) -> list[U16]:
    """The model's bf16 patterns after the warm steps, and after each of SPANS more."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _model(size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), foreach=False)
    wanted = {size.warm_steps, *(size.warm_steps + span for span in SPANS)}
    snapshots = []
    rng = np.random.default_rng(0)
    for step in range(1, max(wanted) + 1):
        _train(model, optimiser, rng, size.vocabulary)
        if step in wanted:
            snapshots.append(_bf16(model))
    return snapshots


def _model(size: _Size) -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = max(2, size.hidden // 64)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=size.intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )
    model: torch.nn.Module = Qwen2ForCausalLM(config).float()
    return model


def _train(model: torch.nn.Module, optimiser: torch.optim.Optimizer, rng: np.random.Generator, vocabulary: int) -> None:
    """One policy-gradient step: half of the sequences were better than the mean, half worse."""
    import torch

    tokens = torch.from_numpy(np.minimum(rng.zipf(1.2, size=BATCH), vocabulary) - 1)
    advantages = torch.from_numpy(rng.permutation([1.0, 1.0, -1.0, -1.0]).astype(np.float32))
    logits: torch.Tensor = model(input_ids=tokens).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(-(advantages[:, None] * chosen).mean())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimiser.step()


def _bf16(model: torch.nn.Module) -> U16:
    import torch

    flat = [each.detach().to(torch.bfloat16).view(torch.int16).flatten() for each in model.parameters()]
    patterns: U16 = torch.cat(flat).numpy().view(np.uint16)
    return patterns


# ------------------------------------------------------------------------------------------------------------ measuring


def _sizes(name: str, base: U16, target: U16) -> dict[str, float]:
    """Share of values that changed, and how much smaller than the model each form is."""
    whole = base.nbytes
    changed = int(np.count_nonzero(base != target))
    ours = sum(len(shard.encode() or shard.target) for shard in _shards(base, target))
    return {
        f"{name}_changed_percent": 100 * changed / base.size,
        f"{name}_mb": ours / 1e6,
        f"{name}_ratio": whole / ours,
        f"{name}_raw_ratio": whole / max(1, _raw_bytes(changed)),
        f"{name}_coo_ratio": whole / _coo_bytes(base, target),
        f"{name}_bytes_per_change": ours / max(1, changed),
    }


@dataclass(frozen=True)
class _Shard:
    """One shard in both versions, with their hashes."""

    base: memoryview
    target: memoryview
    base_sha256: bytes
    target_sha256: bytes

    def encode(self) -> bytes | None:
        runs = [Run(STEPS, len(self.target))]
        return make_patch(self.base, self.target, runs, base_sha256=self.base_sha256, target_sha256=self.target_sha256)

    def decode(self, patch: bytes) -> bytearray:
        return apply_patch(patch, self.base, base_sha256=self.base_sha256, target_sha256=self.target_sha256)

    def check_base(self) -> None:
        if hashlib.sha256(self.base).digest() != self.base_sha256:
            raise ChecksumError("the base changed while it was measured")

    def pack(self) -> bytes | None:
        return pack_shard(self.target, [Run(STEPS, len(self.target))], target_sha256=self.target_sha256)

    def unpack(self, packed: bytes) -> bytearray:
        return unpack_shard(packed, length=len(self.target), target_sha256=self.target_sha256)


def _shards(base: U16, target: U16) -> Iterator[_Shard]:
    old, new = (memoryview(each.view(np.uint8).data) for each in (base, target))
    for start in range(0, len(old), SHARD_BYTES):
        pair = old[start : start + SHARD_BYTES], new[start : start + SHARD_BYTES]
        yield _Shard(*pair, *(hashlib.sha256(each).digest() for each in pair))


def _raw_bytes(changed: int) -> int:
    """An index of 32 bits and a value of 16, uncompressed (TRL's sparse form)."""
    return 6 * changed


def _coo_bytes(base: U16, target: U16, *, columns: int = 640) -> int:
    """Row and column deltas in 8 and 16 bits with the new values, in one zstd stream (PULSE's form, written anew).

    A delta that does not fit takes its stream to 32 bits.
    """
    import pyarrow

    at = np.flatnonzero(base != target)
    rows, places = np.divmod(at, columns)
    down = np.diff(rows, prepend=0)
    across = np.where(down != 0, places, np.diff(places, prepend=0))
    narrow_rows = down.astype(np.uint8 if not at.size or down.max() < 1 << 8 else np.int32)
    streams = narrow_rows.tobytes() + across.astype(np.uint16).tobytes() + target[at].tobytes()
    return len(pyarrow.Codec("zstd", compression_level=ZSTD_LEVEL).compress(streams, asbytes=True))


def _speeds(base: U16, target: U16, repeats: int) -> dict[str, float]:
    """MB of model a second, CPU time of one core; decoding checks the result's hash, as it always does."""
    shards = list(_shards(base, target))
    patches = [shard.encode() or b"" for shard in shards]
    packed = [shard.pack() or b"" for shard in shards]

    def decode() -> None:
        for shard, patch in zip(shards, patches, strict=True):
            shard.decode(patch)

    def check_and_decode() -> None:
        for shard in shards:
            shard.check_base()
        decode()

    def unpack() -> None:
        for shard, data in zip(shards, packed, strict=True):
            shard.unpack(data)

    work: dict[str, Callable[[], Any]] = {
        "encode": lambda: [shard.encode() for shard in shards],
        "decode": decode,
        "decode_and_check_base": check_and_decode,
        "pack": lambda: [shard.pack() for shard in shards],
        "unpack": unpack,
    }
    speeds = {f"{name}_mb_per_s": base.nbytes / 1e6 / _seconds(do, repeats) for name, do in work.items()}
    return speeds | {"packed_ratio": base.nbytes / sum(map(len, packed))}


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    """CPU time of the quickest of some rounds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best
