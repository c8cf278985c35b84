"""A Llama-family decoder in plain torch: one forward pass over fused weights, with or without a key-value cache.

Equal to transformers' Qwen2, Qwen3 and Llama models within float rounding. Leaves out training, dropout, sliding
windows and everything else that a finished policy does not need for generating and checking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from node.engines.model_config import ModelConfig, RopeConfig


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv_heads) head_dim, hidden]: queries, keys and values by one product."""
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """[heads + kv_heads, 1, head_dim]: what qwen3 scales normalised queries and keys by."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class KVCache:
    """Keys and values of the positions seen so far, [layers, rows, kv_heads, capacity, head_dim] each."""

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0) -> None:
        self._keys = keys
        self._values = values
        self.length = length

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, *, capacity: int, like: Tensor) -> KVCache:
        shape = (config.layers, rows, config.kv_heads, capacity, config.head_dim)
        return cls(like.new_empty(shape), like.new_empty(shape))

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values; gives all of them. `advance` moves on after the last layer."""
        stop = self.length + keys.shape[2]
        self._keys[layer, :, :, self.length : stop] = keys
        self._values[layer, :, :, self.length : stop] = values
        return self._keys[layer, :, :, :stop], self._values[layer, :, :, :stop]

    def advance(self, positions: int) -> None:
        self.length += positions

    def part(self, start: int, stop: int) -> KVCache:
        """Some rows, in the same memory; what is appended there shows here once this cache advances too."""
        return KVCache(self._keys[:, start:stop], self._values[:, start:stop], self.length)

    def select(self, rows: Tensor, *, capacity: int = 0) -> KVCache:
        """A copy of some rows, in the order given; a row may be repeated. Capacity 0 keeps this one's."""
        shape = (
            *self._keys.shape[:1],
            len(rows),
            self._keys.shape[2],
            capacity or self._keys.shape[3],
            self._keys.shape[4],
        )
        chosen = KVCache(self._keys.new_empty(shape), self._values.new_empty(shape), self.length)
        chosen._keys[:, :, :, : self.length] = self._keys[:, rows, :, : self.length]
        chosen._values[:, :, :, : self.length] = self._values[:, rows, :, : self.length]
        return chosen


class Decoder:
    """One policy's weights and its forward pass."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], *, device: torch.device) -> None:
        moved = {name: tensor.to(device) for name, tensor in weights.items()}
        self.config = config
        self.embedding = moved["model.embed_tokens.weight"]
        self._norm = moved["model.norm.weight"]
        self._head = self.embedding if config.tied else moved["lm_head.weight"]
        self._layers = [_fuse(config, moved, f"model.layers.{layer}.") for layer in range(config.layers)]
        self._frequencies = rotary_frequencies(config.rope, config.head_dim).to(device)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, *, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Final-norm hidden states [B, T, H] of `tokens` [B, T] that stand at `positions` [B, T].

        `mask` [B, 1, T, total] is true where a token may look. Without one a token sees itself and what comes before.
        """
        hidden = F.embedding(tokens, self.embedding)
        cos, sin = self._rotary(positions)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(layer, hidden, (cos, sin), (index, cache, mask))
            hidden = hidden + self._mlp(layer, hidden)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self._rms_norm(hidden, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of final hidden states [..., H]."""
        return F.linear(hidden, self._head).float()

    def _attention(
        self,
        layer: _Layer,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        place: tuple[int, KVCache | None, Tensor | None],
    ) -> Tensor:
        config = self.config
        batch, length, _ = hidden.shape
        rotated = config.heads + config.kv_heads
        mixed = F.linear(self._rms_norm(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        mixed = mixed.view(batch, length, rotated + config.kv_heads, config.head_dim).transpose(1, 2)
        query_key = mixed[:, :rotated]
        if layer.head_norm is not None:
            query_key = F.rms_norm(query_key, (config.head_dim,), None, config.rms_norm_eps) * layer.head_norm
        query_key = _rotate(query_key, *rotary)
        query, key, value = query_key[:, : config.heads], query_key[:, config.heads :], mixed[:, rotated:]
        index, cache, mask = place
        if cache is not None:
            key, value = cache.extend(index, key, value)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and length > 1,
            enable_gqa=config.heads != config.kv_heads,
        )
        attended = attended.transpose(1, 2).reshape(batch, length, config.heads * config.head_dim)
        return F.linear(attended, layer.output, layer.output_bias)

    def _mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        mixed = F.linear(self._rms_norm(hidden, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = mixed.chunk(2, -1)
        return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(self.embedding.dtype), torch.cat([sin, sin], -1).to(self.embedding.dtype)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of values, float32 [head_dim / 2]; stretched as Llama 3.1 does where asked."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain: Tensor = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "default":
        return plain
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position_embeddings / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = values.chunk(2, -1)
    return values * cos + torch.cat([-high, low], -1) * sin


def _fuse(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
    def get(name: str) -> Tensor | None:
        return weights.get(prefix + name)

    def need(name: str) -> Tensor:
        return weights[prefix + name]

    def stack(kind: str, *names: str) -> Tensor:
        return torch.cat([need(f"{name}.{kind}") for name in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return _Layer(
        attention_norm=need("input_layernorm.weight"),
        qkv=stack("weight", *qkv),
        qkv_bias=stack("bias", *qkv) if config.qkv_bias else None,
        head_norm=_head_norm(config, need) if config.head_norm else None,
        output=need("self_attn.o_proj.weight"),
        output_bias=get("self_attn.o_proj.bias"),
        mlp_norm=need("post_attention_layernorm.weight"),
        gate_up=stack("weight", *gate_up),
        gate_up_bias=stack("bias", *gate_up) if config.mlp_bias else None,
        down=need("mlp.down_proj.weight"),
        down_bias=get("mlp.down_proj.bias"),
    )


def _head_norm(config: ModelConfig, need: Callable[[str], Tensor]) -> Tensor:
    queries = need("self_attn.q_norm.weight").expand(config.heads, 1, -1)
    keys = need("self_attn.k_norm.weight").expand(config.kv_heads, 1, -1)
    return torch.cat([queries, keys])
