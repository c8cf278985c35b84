"""A Llama-family decoder in plain torch: one forward pass over fused weights, with or without a key-value cache.

Equal to transformers' Qwen2, Qwen3 and Llama models within float rounding. Leaves out training, dropout, sliding
windows and everything else that a finished policy does not need for generating and checking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from node.engines.kv_cache import KVCache
from node.engines.linear import Linear
from node.engines.model_config import ModelConfig, RopeConfig

Rotary = tuple[Tensor, Tensor]
_LEAST_TABLE: Final = 1024


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    """[(heads + 2 kv_heads) head_dim, hidden]: queries, keys and values by one product."""
    head_norm: Tensor | None
    """[heads + kv_heads, 1, head_dim]: what qwen3 scales normalised queries and keys by."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """One policy's weights and its forward pass.

    `weights` is read a tensor at a time and nothing of it is kept, so that it may read from files.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], *, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._frequencies = rotary_frequencies(config.rope, config.head_dim).to(device)
        self._eps = torch.tensor(config.rms_norm_eps, device=device)
        self._tables: Rotary | None = None
        self._layers: list[_Layer] = []
        self.update(weights)

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Take other weights of the same shapes, a layer at a time. Where this raises, the decoder is of no use."""
        moved = _Moved(weights, self.device)
        self.embedding = moved["model.embed_tokens.weight"]
        self._norm = moved["model.norm.weight"]
        self._head = Linear(self.embedding if self.config.tied else moved["lm_head.weight"])
        for index in range(self.config.layers):
            layer = _fuse(self.config, moved, f"model.layers.{index}.")
            self._layers[index : index + 1] = [layer]

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, *, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Final-norm hidden states [B, T, H] of `tokens` [B, T] that stand at `positions` [B, T].

        `mask` [B, 1, T, total] is true where a token may look. Without one a token sees itself and what comes before.
        """
        hidden = F.embedding(tokens, self.embedding)
        rotary = self._rotary(positions, (cache.length if cache else 0) + tokens.shape[1])
        for index, layer in enumerate(self._layers):
            query, key, value = self._query_key_value(layer, hidden, rotary)
            if cache is not None:
                key, value = cache.extend(index, key, value)
            causal = mask is None and tokens.shape[1] > 1
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=self.config.heads != self.config.kv_heads,
            )
            hidden = hidden + layer.output(attended.transpose(1, 2).flatten(2))
            hidden = hidden + self._mlp(layer, hidden)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self._rms_norm(hidden, self._norm)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, *, cache: KVCache, start: int, bias: Tensor | None) -> Tensor:
        """Final-norm hidden states [B, H] of one token [B] more in each row, which looks at columns from `start` on.

        `bias` [B · kv_heads, 1, columns] is added to the scores, -inf where a row may not look.
        """
        hidden = F.embedding(tokens, self.embedding)
        cos, sin = (table[:, 0, 0, None] for table in self._rotary(positions[:, None], cache.length + 1))
        for index, layer in enumerate(self._layers):
            mixed = layer.qkv(self._rms_norm(hidden, layer.attention_norm))
            hidden = hidden + layer.output(self._attend_one(layer, mixed, (cos, sin), (index, cache, start, bias)))
            hidden = hidden + self._mlp(layer, hidden)
        cache.advance(1)
        return self._rms_norm(hidden, self._norm)

    def _attend_one(
        self, layer: _Layer, mixed: Tensor, rotary: Rotary, place: tuple[int, KVCache, int, Tensor | None]
    ) -> Tensor:
        """What one token of each row [B, heads · head_dim] sees, from its queries, keys and values."""
        config = self.config
        index, cache, start, bias = place
        mixed = mixed.view(len(mixed), -1, config.head_dim)
        query_key = self._rotated(layer, mixed[:, : config.heads + config.kv_heads], rotary)
        keys, values = cache.append(
            index, query_key[:, config.heads :], mixed[:, config.heads + config.kv_heads :], start=start
        )
        query = query_key[:, : config.heads].reshape(len(keys), -1, config.head_dim)
        return _attend(query, keys, values, bias=bias, scale=config.head_dim**-0.5).view(len(mixed), -1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of final hidden states [..., H]."""
        return self._head(hidden).float()

    def _query_key_value(self, layer: _Layer, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads or kv_heads, T, head_dim] each."""
        config = self.config
        batch, length, _ = hidden.shape
        mixed = layer.qkv(self._rms_norm(hidden, layer.attention_norm))
        mixed = mixed.view(batch, length, config.heads + 2 * config.kv_heads, config.head_dim).transpose(1, 2)
        query_key = self._rotated(layer, mixed[:, : config.heads + config.kv_heads], rotary)
        return query_key[:, : config.heads], query_key[:, config.heads :], mixed[:, config.heads + config.kv_heads :]

    def _rotated(self, layer: _Layer, query_key: Tensor, rotary: Rotary) -> Tensor:
        if layer.head_norm is not None:
            scale = layer.head_norm if query_key.dim() == 4 else layer.head_norm[:, 0]
            query_key = F.rms_norm(query_key, scale.shape[-1:], None, self.config.rms_norm_eps) * scale
        return _rotate(query_key, *rotary)

    def _mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up))

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if hidden.dtype == torch.float32:  # fewer passes over the values than torch's own makes on a CPU
            norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
            return (hidden * torch.addcmul(self._eps, norm, norm, value=1 / hidden.shape[-1]).rsqrt_()).mul_(weight)
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _rotary(self, positions: Tensor, columns: int) -> Rotary:
        """Cosines and signed sines [B, 1, T, head_dim], from a table that grows with the positions: below `columns`."""
        if self._tables is None or len(self._tables[0]) < min(columns, self.config.max_model_len):
            self._tables = self._new_tables(min(self.config.max_model_len, max(_LEAST_TABLE, 2 * columns)))
        cos, sin = self._tables
        return F.embedding(positions, cos)[:, None], F.embedding(positions, sin)[:, None]

    def _new_tables(self, length: int) -> Rotary:
        angles = torch.arange(length, device=self.device).float()[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(self.embedding.dtype), torch.cat([-sin, sin], -1).to(self.embedding.dtype)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Of a KVCache: layers, key-value heads, values a head."""
        return self.config.layers, self.config.kv_heads, self.config.head_dim

    @property
    def token_bytes(self) -> int:
        """Of one position's keys and values."""
        config = self.config
        return 2 * config.layers * config.kv_heads * config.head_dim * self.embedding.element_size()

    @property
    def pass_bytes(self) -> int:
        """About what one position of a forward pass needs while it lasts."""
        config = self.config
        wide = 6 * config.hidden_size + 3 * config.intermediate_size
        return (wide + 4 * (config.heads + 2 * config.kv_heads) * config.head_dim) * self.embedding.element_size()


class _Moved(Mapping[str, Tensor]):
    """Weights as they are on a device, moved when they are asked for."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _attend(query: Tensor, keys: Tensor, values: Tensor, *, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of `groups` queries to the columns of each row and key-value head.

    query [B · kv_heads, groups, D], keys and values [B · kv_heads, columns, D], bias [B · kv_heads, 1, columns]. Two
    plain products are quicker than the fused kernel on a CPU, which is made for many queries of a row.
    """
    if query.device.type != "cpu" or query.dtype != torch.float32:
        mask = None if bias is None else bias.to(query.dtype)[None]
        attended = F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scale)
        return attended[0]
    beta = 0 if bias is None else 1
    scores = torch.baddbmm(
        query[:, :1, :1] if bias is None else bias, query, keys.transpose(1, 2), beta=beta, alpha=scale
    )
    return torch.bmm(torch.softmax(scores, -1), values)


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


def _rotate(values: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + D/2}) turned by its angle; the sine's sign is in the table."""
    return torch.addcmul(values * cos, values.roll(values.shape[-1] // 2, -1), signed_sin)


def _fuse(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
    def need(name: str) -> Tensor:
        return weights[prefix + name]

    def linear(*names: str, bias: bool) -> Linear:
        stacked = {
            kind: [need(f"{name}.{kind}") for name in names] for kind in ("weight", *(("bias",) if bias else ()))
        }
        joined = {kind: torch.cat(parts) if len(parts) > 1 else parts[0] for kind, parts in stacked.items()}
        return Linear(joined["weight"], joined.get("bias"))

    return _Layer(
        attention_norm=need("input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
        head_norm=_head_norm(config, need) if config.head_norm else None,
        output=linear("self_attn.o_proj", bias=config.output_bias),
        mlp_norm=need("post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
        down=linear("mlp.down_proj", bias=config.mlp_bias),
    )


def _head_norm(config: ModelConfig, need: Callable[[str], Tensor]) -> Tensor:
    queries = need("self_attn.q_norm.weight").expand(config.heads, 1, -1)
    keys = need("self_attn.k_norm.weight").expand(config.kv_heads, 1, -1)
    return torch.cat([queries, keys])
