"""Attention in its many spellings: ViT, Swin, BERT, GPT-2, OPT, LLaMA, T5, mixed experts,
torch's own transformer.
"""

from __future__ import annotations

import math

import torch
from harness import Case, architecture, images, prepared, tokens
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 4


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """(batch, length, width) by heads."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """Heads side by side again."""
    return x.transpose(1, 2).flatten(2)


def mlp(act: nn.Module) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), act, nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    """Attention and two linear layers, norms before (Xiong et al. 2020)."""

    def __init__(self, act: nn.Module, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.causal = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), causal
        self.qkv, self.out, self.mlp = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            mlp(act),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(merged(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches as words, after a class token (Dosovitskiy et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.token, self.position = (
            nn.Parameter(torch.randn(1, 1, WIDTH)),
            nn.Parameter(torch.randn(1, 17, WIDTH)),
        )
        self.blocks = nn.Sequential(
            Block(nn.GELU(), causal=False), Block(nn.GELU(), causal=False)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


@architecture
def vit() -> Case:
    return Case(prepared(ViT()), images(4, 3, 32, 32))


class ShiftedWindows(nn.Module):
    """Attention inside windows of a rolled image, with a bias by distance and a mask of -100
    (Liu et al. 2021).
    """

    def __init__(self, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, HEADS))
        at = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        step = at[:, None] - at[None] + window - 1
        self.register_buffer("index", step[..., 0] * (2 * window - 1) + step[..., 1])
        region = torch.zeros(1, size, size, 1)
        region[:, -shift:] += 1
        region[:, :, -shift:] += 2
        where = self.windows(region).squeeze(-1)
        self.register_buffer("mask", (where[:, None] != where[:, :, None]).float() * -100)

    def windows(self, x: Tensor) -> Tensor:
        """(batch, size, size, channels) cut into windows, one batch entry each."""
        n, w = self.size // self.window, self.window
        return (
            x.view(-1, n, w, n, w, x.shape[-1])
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, w * w, x.shape[-1])
        )

    def forward(self, x: Tensor) -> Tensor:
        n, w = self.size // self.window, self.window
        rolled = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        q, k, v = map(heads, self.qkv(self.windows(rolled)).chunk(3, -1))
        bias = self.bias[self.index.view(-1)].view(w * w, w * w, HEADS).permute(2, 0, 1)
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1) + bias
        scores = scores.view(-1, n * n, HEADS, w * w, w * w) + self.mask[:, None]
        y = self.out(merged(scores.view(-1, HEADS, w * w, w * w).softmax(-1) @ v))
        y = (
            y.view(-1, n, n, w, w, WIDTH)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, self.size, self.size, WIDTH)
        )
        return x + torch.roll(y, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    """Patches, shifted windows, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, WIDTH, 4, 4), ShiftedWindows(8, 4, 2)
        self.norm, self.mlp, self.head = (
            nn.LayerNorm(WIDTH),
            mlp(nn.GELU()),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.patches(x).permute(0, 2, 3, 1))
        return self.head((x + self.mlp(self.norm(x))).mean((1, 2)))


@architecture
def swin() -> Case:
    return Case(prepared(Swin()), images(4, 3, 32, 32))


class Bert(nn.Module):
    """Norms after, a mask of the dtype's lowest value made from ones and zeros (Devlin et al.
    2018).
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = (
            nn.Embedding(80, WIDTH, padding_idx=0),
            nn.Embedding(16, WIDTH),
        )
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp, self.pool, self.head = (
            mlp(nn.GELU()),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.norm0(self.words(ids) + self.position(torch.arange(ids.shape[1])))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        scores = (
            heads(self.q(x)) @ heads(self.k(x)).transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            + mask
        )
        x = self.norm1(x + self.out(merged(scores.softmax(-1) @ heads(self.v(x)))))
        return self.head(torch.tanh(self.pool(self.norm2(x + self.mlp(x))[:, 0])))


@architecture
def bert() -> Case:
    mask = (torch.arange(12) < torch.tensor([12, 9, 5, 3])[:, None]).long()
    return Case(prepared(Bert()), tuple((ids[0], mask) for ids in tokens(4, 12, 80)))


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is transposed, so it is an addmm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], y.shape[-1])


class GPT2(nn.Module):
    """Radford et al. 2019; the head shares the words' matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(80, WIDTH), nn.Embedding(16, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.up, self.down = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 80, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.words(ids) + self.position.weight[:length]
        q, k, v = map(heads, self.qkv(self.norm1(x)).split(WIDTH, -1))
        scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5)
        scores = torch.where(
            self.causal[:length, :length], scores, torch.full([], torch.finfo(x.dtype).min)
        )
        x = x + self.out(merged(scores.softmax(-1) @ v))
        y = self.up(self.norm2(x))
        y = (
            0.5
            * y
            * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3))))
        )
        return self.head(self.norm3(x + self.down(y)))


@architecture
def gpt2() -> Case:
    return Case(prepared(GPT2()), tokens(4, 12, 80))


class OPT(nn.Module):
    """ReLU between the linear layers, a causal mask of -inf added (Zhang et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(80, WIDTH), nn.Embedding(18, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = (
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            mlp(nn.ReLU()),
        )
        self.head = nn.Linear(WIDTH, 80, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.words(ids) + self.position(torch.arange(length) + 2)
        causal = torch.full((length, length), float("-inf")).triu(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=causal, need_weights=True)[0]
        return self.head(x + self.mlp(self.norm2(x)))


@architecture
def opt() -> Case:
    return Case(prepared(OPT()), tokens(4, 12, 80))


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """Rotary positions, fewer keys than queries, a gated linear unit (Touvron et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm1, self.norm2, self.norm3 = (
            nn.Embedding(80, WIDTH),
            RMSNorm(),
            RMSNorm(),
            RMSNorm(),
        )
        self.q, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.k, self.v = (
            nn.Linear(WIDTH, WIDTH // 2, bias=False),
            nn.Linear(WIDTH, WIDTH // 2, bias=False),
        )
        self.gate, self.up = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down, self.head = (
            nn.Linear(64, WIDTH, bias=False),
            nn.Linear(WIDTH, 80, bias=False),
        )
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, 8, 2) / 8))

    @staticmethod
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Pairs of channels turned by an angle that grows with the position (Su et al.
        2021).
        """
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.words(ids), ids.shape[1]
        angles = torch.arange(length).float()[:, None] @ self.frequencies[None]
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        y = self.norm1(x)
        q, k = (
            self.rotated(heads(self.q(y)), cos, sin),
            self.rotated(heads(self.k(y), HEADS // 2), cos, sin),
        )
        k, v = k.repeat_interleave(2, 1), heads(self.v(y), HEADS // 2).repeat_interleave(2, 1)
        x = x + self.out(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = self.norm2(x)
        return self.head(self.norm3(x + self.down(F.silu(self.gate(y)) * self.up(y))))


@architecture
def llama() -> Case:
    return Case(prepared(Llama()), tokens(4, 12, 80))


class T5(nn.Module):
    """A bias by distance, learned for buckets of distances (Raffel et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.distance, self.norm = (
            nn.Embedding(80, WIDTH),
            nn.Embedding(8, HEADS),
            nn.RMSNorm(WIDTH),
        )
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.words(ids), torch.arange(ids.shape[1])
        far = (at[None] - at[:, None]).abs()
        bucket = torch.where(
            far < 4, far, (far.float().clamp_min(1).log2() + 2).long().clamp_max(7)
        )
        y = self.norm(x)
        scores = heads(self.q(y)) @ heads(self.k(y)).transpose(-1, -2) + self.distance(
            bucket
        ).permute(2, 0, 1)
        return x + self.out(merged(scores.softmax(-1) @ heads(self.v(y))))


@architecture
def t5() -> Case:
    return Case(prepared(T5()), tokens(4, 12, 80))


class Experts(nn.Module):
    """Every expert computes, a gate of the best two weighs them (Shazeer et al. 2017, without
    sending words around).
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(80, WIDTH), nn.Linear(WIDTH, 4)
        self.experts, self.head = (
            nn.ModuleList(mlp(nn.GELU()) for _ in range(4)),
            nn.Linear(WIDTH, 80),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        best, index = self.gate(x).topk(2, -1)
        weights = torch.zeros(*ids.shape, 4).scatter(-1, index, best.softmax(-1))
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head(x + (outputs * weights.unsqueeze(-2)).sum(-1))


@architecture
def mixture_of_experts() -> Case:
    return Case(prepared(Experts()), tokens(4, 12, 80))


class Sequence2Sequence(nn.Module):
    """torch's own encoder and decoder, the causal mask given by the caller, as a float tensor
    of -inf.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(80, WIDTH), nn.Linear(WIDTH, 80)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, causal: Tensor) -> Tensor:
        decoded = self.transformer(
            self.words(source), self.words(target), tgt_mask=causal[0], tgt_is_causal=False
        )
        return self.head(decoded)


@architecture
def encoder_decoder() -> Case:
    causal = nn.Transformer.generate_square_subsequent_mask(8).expand(4, 8, 8)
    pairs = zip(tokens(4, 10, 80), tokens(4, 8, 80), strict=True)
    return Case(
        prepared(Sequence2Sequence()),
        tuple((source[0], target[0], causal) for source, target in pairs),
    )
