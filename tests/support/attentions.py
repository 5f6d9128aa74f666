"""Attentions of several shapes, small and without training, and what they compute with a
quantized key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax

HEADS, FEATURES, WIDTH = 4, 8, 32
Change = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    return x


def rotated(x: Tensor) -> Tensor:
    """The rotary embedding, as transformers writes it."""
    tokens = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
    angles = tokens / 10 ** torch.arange(0, FEATURES, 2, dtype=x.dtype)
    angles = torch.cat([angles, angles], dim=-1)
    half = FEATURES // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * angles.cos() + turned * angles.sin()


class Attention(nn.Module):
    """Query, key and value of their own layers, rotated, with any number of heads for keys."""

    def __init__(self, kv_heads: int = HEADS, *, is_written_out: bool = False) -> None:
        super().__init__()
        self.kv_heads, self.is_written_out = kv_heads, is_written_out
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, kv_heads * FEATURES)
        self.v_proj = nn.Linear(WIDTH, kv_heads * FEATURES)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        # What the cache makes of keys and values
        self.key, self.value = unchanged, unchanged

    def forward(self, x: Tensor) -> Tensor:
        def heads(made: Tensor) -> Tensor:
            return made.unflatten(-1, (-1, FEATURES)).transpose(1, 2)

        query = rotated(heads(self.q_proj(x)))
        key = self.key(rotated(heads(self.k_proj(x))))
        value = self.value(heads(self.v_proj(x)))
        repeats = HEADS // self.kv_heads
        if repeats > 1:
            key, value = (y.repeat_interleave(repeats, dim=1) for y in (key, value))
        if self.is_written_out:
            scores = query @ key.transpose(2, 3) / math.sqrt(FEATURES)
            mixed = softmax(scores, dim=-1) @ value
        else:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        done: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return done


class Fused(nn.Module):
    """One layer for query, key and value; heads are in one axis with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def heads(made: Tensor) -> Tensor:
            split = made.unflatten(-1, (HEADS, FEATURES)).transpose(1, 2)
            return split.reshape(-1, x.shape[1], FEATURES)

        query, key, value = map(heads, self.query_key_value(x).chunk(3, dim=-1))
        scores = torch.baddbmm(torch.zeros(()), query, key.transpose(1, 2), beta=0.0)
        mixed = torch.bmm(softmax(scores, dim=-1), value).unflatten(0, (-1, HEADS))
        done: Tensor = self.dense(mixed.transpose(1, 2).flatten(2))
        return done


class Blocks(nn.Module):
    """Attentions one after the other, around which the input flows."""

    def __init__(self, *attentions: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": each}) for each in attentions)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["attn"](x)
        return x


def blocks(*attentions: nn.Module) -> nn.Module:
    """The module, for evaluation, with weights from one seed."""
    torch.manual_seed(0)
    model = Blocks(*attentions).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batches(count: int = 2) -> list[Tensor]:
    """Batches of two sequences of six tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 6, WIDTH, generator=generator) for _ in range(count)]


def cache_config(spec: Mapping[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    """A config that quantizes only the key-value cache of the layers with these names."""
    entries = {f"*.{name}": {"output_tensors": dict(spec)} for name in names}
    return {"global_quant_config": {}, "kv_cache_quant_config": entries, **more}
