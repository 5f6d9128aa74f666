"""The fixed work of every benchmark: ResNet-18 on colour noise with photos' spectrum, a small
LLaMA on Zipf tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

COLOUR_MIX = ((0.9, 0.3, 0.1), (0.9, 0.0, -0.2), (0.9, -0.3, 0.1))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU()
        self.down: nn.Sequential | None = None
        if stride != 1 or inplanes != planes:
            self.down = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[N, inplanes, H, W] to [N, planes, H/stride, W/stride]."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + (x if self.down is None else self.down(x)))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """Four stages of two blocks, for 224x224 images."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks, inplanes = [], 64
        for planes, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inplanes, planes, stride), BasicBlock(planes, planes)]
            inplanes = planes
        self.layers = nn.Sequential(*blocks)
        self.avg = nn.AdaptiveAvgPool2d(1)
        self.flat = nn.Flatten()
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] to logits [N, classes]."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.flat(self.avg(self.layers(x))))  # type: ignore[no-any-return]


def images(count: int = 100, batch: int = 10, size: int = 224, seed: int = 1) -> list[Tensor]:
    """`count` images of 1/f noise, of about unit variance and correlated channels, as [batch,
    3, size, size].
    """
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)[None]
    amplitude = 1 / (rows**2 + columns**2).sqrt().clamp_min(1 / size)
    white = torch.randn(count, 3, size, size, generator=generator)
    x = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(size, size))
    x = x / x.std(dim=(1, 2, 3), keepdim=True)
    x = torch.einsum("oc,nchw->nohw", torch.tensor(COLOUR_MIX), x)
    brightness = 0.1 * torch.randn(count, 1, 1, 1, generator=generator)
    x = (x / x.std() + brightness).clamp_(-2.6, 2.6)
    return list(torch.split(x.contiguous(), batch))


def resnet18(seed: int = 0) -> ResNet18:
    """The model in eval mode: random weights of the usual scale, batch statistics averaged over
    20 images.
    """
    torch.manual_seed(seed)
    model = ResNet18()
    settle(model, images(20, 10, seed=99))
    return model


@torch.no_grad()
def settle(model: nn.Module, batches: list[Tensor]) -> None:
    """Draw weights of the usual scale, average the statistics of batch norms over the batches,
    and leave the model in eval mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.4, 1.2)
            nn.init.normal_(module.bias, 0, 0.15)
            module.momentum = None  # a plain average over the batches
    model.train()
    for batch in batches:
        model(batch)
    model.eval()


class Rotary(nn.Module):
    """Rotary position embedding (arXiv 2104.09864) of heads of `width`."""

    def __init__(self, width: int, length: int = 1024) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width)
        )
        self.register_buffer("cos", torch.cat([angles, angles], dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], dim=-1).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, heads, T, width] to the same, turned by its positions."""
        length, (left, right) = x.shape[-2], x.chunk(2, dim=-1)
        return x * self.cos[:length] + torch.cat([-right, left], dim=-1) * self.sin[:length]  # type: ignore[index]


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.rotary = heads, Rotary(hidden // heads)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, hidden] to the same."""
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(
            self.rotary(q), self.rotary(k), v, is_causal=True
        )
        return self.o_proj(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and a gated feed-forward part, each after a norm and around a shortcut."""

    def __init__(self, hidden: int, inter: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, 1e-6),
            nn.RMSNorm(hidden, 1e-6),
        )
        self.self_attn = Attention(hidden, heads)
        self.gate_proj, self.up_proj = (
            nn.Linear(hidden, inter, bias=False),
            nn.Linear(hidden, inter, bias=False),
        )
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A LLaMA (arXiv 2302.13971) that is small enough for a CPU."""

    def __init__(
        self, vocabulary: int = 8000, hidden: int = 512, inter: int = 1408, layers: int = 4
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.Sequential(
            *(DecoderLayer(hidden, inter, heads=8) for _ in range(layers))
        )
        self.norm = nn.RMSNorm(hidden, 1e-6)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [N, T] to logits [N, T, vocabulary]."""
        return self.lm_head(self.norm(self.layers(self.embed_tokens(tokens))))  # type: ignore[no-any-return]


def llama(seed: int = 0) -> Llama:
    """Seeded, in eval mode, and drawn like a trained model."""
    torch.manual_seed(seed)
    model = Llama().eval()
    draw_like_trained(model, model.embed_tokens, seed)
    return model


@torch.no_grad()
def draw_like_trained(model: nn.Module, embedding: nn.Embedding, seed: int) -> None:
    """Draw the weights of a language model: inputs that correlate, and a few outlier channels,
    as trained models have them.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    vocabulary, hidden = embedding.weight.shape
    basis, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))
    spectrum = torch.arange(1, hidden + 1).float().pow(-0.6)
    noise = torch.randn(vocabulary, hidden, generator=generator)
    embedding.weight.copy_(noise * spectrum / spectrum.norm() * hidden**0.5 @ basis.T)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            parameter[torch.randperm(hidden, generator=generator)[:5]] *= 8
        elif "proj" in name:
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
            )


def tokens(
    count: int = 32, length: int = 256, vocabulary: int = 8000, seed: int = 2
) -> list[Tensor]:
    """`count` sequences as [1, length]; how often each token occurs follows Zipf's law."""
    frequency = torch.arange(1, vocabulary + 1).float().reciprocal()
    drawn = torch.multinomial(
        frequency, count * length, True, generator=torch.Generator().manual_seed(seed)
    )
    return list(torch.split(drawn.view(count, length), 1))
