"""Small models of many kinds, to which `init --model` fits presets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from support import llamas, moe, structures, toys
from support.encoders import Encoder, sentences


class Example(NamedTuple):
    """A model and one call of it."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Vision(nn.Module):
    """Patches, one block with LayerNorm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.projection, self.up, self.down = (
            nn.Linear(32, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm1(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) / 6.0
        x = x + self.projection(scores.softmax(-1) @ self.value(y))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return self.head(self.norm(x).mean(1))


class Tagger(nn.Module):
    """Words, an LSTM in both directions, and a tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.lstm = nn.LSTM(24, 16, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(32, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tags(self.lstm(self.words(ids))[0])


class Detector(nn.Module):
    """A head for boxes and one for scores, which are joined and sorted by score."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.body = nn.Conv2d(32, 64, 3, padding=1)
        self.boxes, self.scores = nn.Conv2d(64, 4, 1), nn.Conv2d(64, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.body(torch.relu(self.norm(self.stem(x)))))
        boxes = self.boxes(x).exp() * 8.0
        return torch.cat([boxes, self.scores(x).sigmoid()], 1).flatten(2).transpose(1, 2)


class Upsampler(nn.Module):
    """Transposed convolutions, as decoders of images have them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.ConvTranspose2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.up(torch.relu(self.down(x)))))


class Lookup(nn.Module):
    """An embedding alone, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).mean(1)


class Weightless(nn.Module):
    """No layer has weights."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * 2.0 - 0.5).mean(1)


def odd_widths() -> nn.Module:
    """Return a perceptron of the widths 7 and 13."""
    return nn.Sequential(
        nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 13), nn.ReLU(), nn.Linear(13, 7)
    )


def _images(*sizes: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(*sizes, generator=generator),)


def _ids(high: int, *sizes: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, high, sizes, generator=generator),)


def _pretrained(family: str) -> Example:
    return Example(*structures.pretrained(family))


def _toy(name: str) -> Example:
    made = toys.built(name)
    return Example(made.module, made.args, dict(made.kwargs))


EXAMPLES: dict[str, Callable[[], Example]] = {
    "convolutions": lambda: _toy("residual"),
    "depthwise": lambda: _toy("mobile"),
    "vision": lambda: Example(Vision(), _images(2, 3, 16, 16)),
    "encoder": lambda: Example(Encoder(), (), sentences(2, 8)),
    "tagger": lambda: Example(Tagger(), _ids(50, 2, 6)),
    "recurrent": lambda: _toy("gated"),
    "detector": lambda: Example(Detector(), _images(2, 3, 16, 16)),
    "llama": lambda: Example(llamas.llama(use_cache=False), (), llamas.tokens(1)[0]),
    "gpt2": lambda: _pretrained("GPT2"),
    "experts": lambda: Example(moe.mixture("Mixtral"), (moe.IDS,)),
    "expert_modules": lambda: Example(structures.Mixture(64), _images(2, 4, 64)),
    "lookup": lambda: Example(Lookup(), _ids(40, 2, 5)),
    "odd_widths": lambda: Example(odd_widths(), _images(2, 7)),
    "transposed": lambda: Example(Upsampler(), _images(2, 3, 8, 8)),
    "weightless": lambda: Example(Weightless(), _images(2, 4)),
    "one_layer": lambda: Example(nn.Linear(64, 5), _images(2, 64)),
    "products": lambda: _toy("products"),
    "stubs": lambda: _toy("partial"),
}
"""By name, models that presets must fit or refuse."""
NEED_TRANSFORMERS = {"llama", "gpt2", "experts"}


@cache
def example(name: str) -> Example:
    """Return the model in eval mode, built from one seed."""
    torch.manual_seed(0)
    made = EXAMPLES[name]()
    made.module.eval().requires_grad_(False)
    return made


@cache
def example_graph(name: str) -> Graph:
    """Return the model's trace."""
    made = example(name)
    return trace(made.module, made.args, made.kwargs)
