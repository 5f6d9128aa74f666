"""Small seeded models, one per thing that tracing, planning or emission can get wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace


@dataclass(frozen=True)
class Toy:
    """A model and an example call of batch two; `batched` False for models without a batch
    dimension in common.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batched: bool = True

    def call(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arguments shaped like the example, with another batch size."""
        generator = torch.Generator().manual_seed(batch)

        def other(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = (batch, *value.shape[1:]) if self.batched and value.dim() else value.shape
            if value.is_floating_point():
                return torch.randn(shape, generator=generator)
            return torch.randint(0, 5, shape, generator=generator, dtype=value.dtype)

        args, kwargs = pytree.tree_map(other, (self.args, dict(self.kwargs)))
        return args, kwargs


TOYS: dict[str, Callable[[], Toy]] = {}


def toy(make: Callable[[], Toy]) -> Callable[[], Toy]:
    """Register a toy under its function's name."""
    assert make.__name__ not in TOYS
    TOYS[make.__name__] = make
    return make


@cache
def built(name: str) -> Toy:
    """The toy, seeded, in eval mode, with batch norm statistics that are not the identity."""
    torch.manual_seed(0)
    made = TOYS[name]()
    shake(made.module)
    return made


@cache
def traced(name: str) -> Graph:
    """The toy's graph."""
    made = built(name)
    return trace(made.module, made.args, made.kwargs)


def shake(module: nn.Module) -> nn.Module:
    """Random statistics and affine values in every batch norm; eval mode."""
    for child in module.modules():
        if (
            isinstance(child, nn.modules.batchnorm._BatchNorm)
            and child.running_mean is not None
        ):
            child.running_mean.normal_()
            child.running_var.uniform_(0.5, 2.0)
            if child.affine:
                child.weight.data.uniform_(0.5, 1.5)
                child.bias.data.normal_()
    return module.eval()


def leaves_equal(ours: Any, theirs: Any, tolerance: float = 0.0) -> bool:
    """Whether two nested outputs have the same structure, types and values (within an absolute
    tolerance).
    """
    ours, spec = pytree.tree_flatten(ours)
    theirs, other = pytree.tree_flatten(theirs)
    if spec != other:
        return False
    return all(
        torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=tolerance))
        if isinstance(a, Tensor)
        else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv2(self.relu(self.bn1(self.conv1(x)))) + x)


class Residual(nn.Module):
    """A stem, two blocks in a Sequential, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.pool(self.layer1(x)).flatten(1))


@toy
def residual() -> Toy:
    return Toy(Residual(), (torch.randn(2, 3, 8, 8),))


class Containers(nn.Module):
    """Layers in a ModuleList, in a ModuleDict and under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.d = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.shared = self.l[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.l:
            x = torch.relu(layer(x))
        return self.shared(self.d["a"](x))


@toy
def containers() -> Toy:
    return Toy(Containers(), (torch.randn(2, 4),))


class Reused(nn.Module):
    """One block called twice, one activation called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.block(self.act(self.block(self.act(x)))))


@toy
def reused() -> Toy:
    return Toy(Reused(), (torch.randn(2, 3, 5, 5),))


class Functional(nn.Module):
    """Operators without modules, several of one kind in one scope."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.conv(x))
        z = torch.cat([y, F.leaky_relu(y, 0.2)], dim=1)
        z = F.max_pool2d(z, 2)[:, 1:5]
        z = z * 2 + F.silu(z) - 0.5
        return (z.flatten(1) @ z.flatten(1).t()).softmax(-1)


@toy
def functional() -> Toy:
    return Toy(Functional(), (torch.randn(2, 2, 4, 4),))


class InPlace(nn.Module):
    """In-place operators whose original is read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        alias = y
        before = y * 2
        y.relu_()
        y += 1
        F.relu(y, inplace=True)
        y.add_(before).mul_(3)
        return alias - 1, before


@toy
def in_place() -> Toy:
    return Toy(InPlace(), (torch.randn(2, 4),))


class InPlaceView(nn.Module):
    """An in-place operator on a view changes the tensor behind it; batch norm stays one
    operator on the way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.fc(x))
        y[:, 0] += 1
        y.view(-1).mul_(2)
        y[:, 1] = 0.25
        return F.relu(y)


@toy
def in_place_view() -> Toy:
    return Toy(InPlaceView(), (torch.randn(2, 4),))


class ViewReadLater(nn.Module):
    """A view made before its base is changed in place shows the change."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y.reshape(-1, 4)
        y += 1
        return view - y


@toy
def view_read_later() -> Toy:
    return Toy(ViewReadLater(), (torch.randn(2, 4),))


class NestedInputs(nn.Module):
    """Positional and keyword arguments in dicts and lists, one of them unused."""

    def forward(
        self, xs: list[Tensor], opts: dict[str, Any], *, scale: Tensor, flag: bool = True
    ) -> dict[str, Any]:
        y = xs[0] + opts["k"][1] * scale
        return {"sum": y, "pair": (y if flag else -y, xs[1]), "constant": 3, "nothing": None}


@toy
def nested_inputs() -> Toy:
    a, b, c, d = (torch.randn(2, 3) for _ in range(4))
    return Toy(
        NestedInputs(),
        ([a, b],),
        {"opts": {"k": [c, d]}, "scale": torch.randn(2, 3), "flag": False},
    )


class Pair(NamedTuple):
    """An output type of the user's own."""

    logits: Tensor
    hidden: Tensor


class SeveralOutputs(nn.Module):
    """A named tuple, as libraries return."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, unused: Tensor) -> Pair:
        return Pair(self.fc(x), x)


@toy
def several_outputs() -> Toy:
    return Toy(SeveralOutputs(), (torch.randn(2, 3), torch.randn(2, 1)))


class FreeTensors(nn.Module):
    """Parameters, buffers and literal tensors in expressions."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("factor", torch.randn(4))
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x * self.factor + self.shift, self.weight)
        return y + torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.shift


@toy
def free_tensors() -> Toy:
    return Toy(FreeTensors(), (torch.randn(2, 4),))


class Tied(nn.Module):
    """A language model's embedding shares its matrix with the last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


@toy
def tied() -> Toy:
    return Toy(Tied(), (torch.randint(0, 7, (2, 3)),))


class Attention(nn.Module):
    """torch's own multi-head attention and a hand-written one."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mha(x, x, x, need_weights=False)[0]
        mask = torch.full((3, 3), -100.0).triu(1)
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / 2 + mask
        attended = scores.softmax(-1, dtype=torch.float32) @ self.v(x)
        return F.scaled_dot_product_attention(attended, x, x, is_causal=True)


@toy
def attention() -> Toy:
    return Toy(Attention(), (torch.randn(2, 3, 4),))


class Recurrent(nn.Module):
    """An LSTM is one operator with a list of parameters and three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


@toy
def recurrent() -> Toy:
    return Toy(Recurrent(), (torch.randn(2, 5, 3),))


class Constants(nn.Module):
    """Infinities, dtypes and negative numbers as arguments."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x.masked_fill(mask > 2, float("-inf")).softmax(-1, dtype=torch.float64)
        return torch.clamp(y.to(torch.float32), min=float("-inf"), max=0.5) + torch.arange(
            3, dtype=torch.float32
        )


@toy
def constants() -> Toy:
    return Toy(Constants(), (torch.randn(2, 3), torch.randint(0, 3, (2, 3))))


class Transposed(nn.Module):
    """Transposed convolutions with groups, with `output_size` left to torch, between 1-D, 2-D
    and 3-D layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.bn = nn.BatchNorm2d(6)
        self.line = nn.Conv1d(6, 4, 3, padding="same")
        self.bn1 = nn.BatchNorm1d(4)
        self.cube = nn.Conv3d(1, 2, 2, dilation=2)
        self.bn3 = nn.BatchNorm3d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.up(x)).flatten(2)
        y = F.relu(self.bn1(self.line(y)))
        y = y.reshape(y.shape[0], 1, 4, 8, 8)
        return self.bn3(self.cube(y)).mean((2, 3, 4))


@toy
def transposed() -> Toy:
    return Toy(Transposed(), (torch.randn(2, 4, 4, 4),))


class Mobile(nn.Module):
    """Depthwise convolution, ReLU6, squeeze and excitation, SiLU, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dw = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.bn = nn.BatchNorm2d(4, eps=0.1)
        self.act = nn.ReLU6(inplace=True)
        self.se = nn.Conv2d(4, 4, 1)
        self.silu = nn.SiLU()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.dw(x)))
        gate = torch.sigmoid(self.silu(self.se(F.adaptive_avg_pool2d(y, 1))))
        y = (y * gate).mean((2, 3))
        return self.fc(self.drop(y))


@toy
def mobile() -> Toy:
    return Toy(Mobile(), (torch.randn(2, 4, 6, 6),))


class Branches(nn.Module):
    """Concatenations of activations, of a reshaped tensor and of a graph input; chunks and a
    shuffle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 1), nn.Conv2d(2, 4, 3, padding=1)
        self.out = nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.max_pool2d(F.relu(self.b(x)), 3, 1, 1)
        left, right = self.out(torch.cat([a, b, x], 1)).chunk(2, 1)
        y = torch.stack([left, right], 1).permute(0, 2, 1, 3, 4).flatten(1, 2)
        return F.interpolate(F.pixel_shuffle(y, 2), scale_factor=2.0)


@toy
def branches() -> Toy:
    return Toy(Branches(), (torch.randn(2, 2, 4, 4),))


class Normalized(nn.Module):
    """Normalizations other than batch norm in eval mode with statistics, and a parametric
    activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
        self.batch = nn.BatchNorm2d(4, track_running_stats=False)
        self.rms, self.prelu = nn.RMSNorm(4), nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.instance(self.prelu(self.group(self.conv(x)))))
        return self.rms(y.permute(0, 2, 3, 1))


@toy
def normalized() -> Toy:
    return Toy(Normalized(), (torch.randn(2, 2, 3, 3),))


class Positional(nn.Module):
    """Position embeddings, integer arithmetic on sizes, an index tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(3, 4)
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        y = self.embed(tokens) + self.position(torch.arange(length))
        y = y[:, self.order].reshape(batch * length, 4)
        return y.view(batch, -1) * (batch * 2)


@toy
def positional() -> Toy:
    return Toy(Positional(), (torch.randint(0, 9, (2, 3)),))


class TwoBatches(nn.Module):
    """Inputs whose first dimensions differ: nothing is taken for a batch."""

    def forward(self, x: Tensor, queries: Tensor) -> Tensor:
        return queries @ x.t()


@toy
def two_batches() -> Toy:
    return Toy(TwoBatches(), (torch.randn(2, 4), torch.randn(3, 4)), batched=False)


class StaticBatch(nn.Module):
    """The batch size stands in the code."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1) * 2


@toy
def static_batch() -> Toy:
    return Toy(StaticBatch(), (torch.randn(2, 4),), batched=False)


class Variadic(nn.Module):
    """Takes any number of tensors."""

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, 1) * len(xs)


@toy
def variadic() -> Toy:
    return Toy(Variadic(), (torch.randn(2, 3), torch.randn(2, 1)))


class Permuting(nn.Module):
    """An einsum that only permutes returns a view, whose base is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.fc(x))
        return torch.einsum("bij->bji", y) * 3 + y


@toy
def permuting() -> Toy:
    return Toy(Permuting(), (torch.randn(2, 4, 4),))


class Gated(nn.Module):
    """Recurrent layers of every kind: both directions, several layers, given states, no biases,
    a single step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 4, 2, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(8, 3, bias=False, batch_first=True)
        self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        self.tanh, self.cell, self.fc = (
            nn.RNN(4, 4, batch_first=True),
            nn.GRUCell(4, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, last = self.gru(x, state.transpose(0, 1).contiguous())
        z, (hidden, cell) = self.lstm(y)
        z, _ = self.tanh(self.rnn(z)[0])
        return self.fc(self.cell(z[:, -1], z[:, 0])), last[0] * hidden[0].sum(), cell


@toy
def gated() -> Toy:
    # Each step costs a trace tens of operators
    return Toy(Gated(), (torch.randn(2, 3, 5), torch.randn(2, 4, 4)))


class Masked(nn.Module):
    """Masks as they are written: added, filled in, chosen, from constants, integers and
    comparisons.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("causal", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        y = (scores / 2 + self.causal).softmax(-1) @ self.v(x)
        low = torch.finfo(x.dtype).min
        y = y + (scores + (1.0 - (keep > 0)[:, None].float()) * low).softmax(-1) @ x
        y = y + torch.where(torch.ones(3, 3).tril() > 0, scores, low).softmax(-1) @ x
        filled = scores.masked_fill((keep > 3)[:, None], -1e9)
        weights = torch.exp(filled - filled.amax(-1, keepdim=True))
        return y + (weights / weights.sum(-1, keepdim=True)) @ x


@toy
def masked() -> Toy:
    return Toy(Masked(), (torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.long)))


class QuantStub(nn.Identity):
    """Stands for torch.ao.quantization's, which is found by its name."""


class DeQuantStub(nn.Identity):
    """Stands for torch.ao.quantization's."""


class Partial(nn.Module):
    """Only what lies between the stubs is to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.before, self.inside, self.after = (
            nn.Conv2d(2, 4, 1),
            nn.Conv2d(4, 4, 1),
            nn.Linear(4, 3),
        )
        self.shift, self.scale = (
            nn.Parameter(torch.randn(4, 1, 1)),
            nn.Parameter(torch.randn(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.quant(F.relu(self.before(x)))
        y = self.dequant(F.relu(self.inside(y) + self.shift))
        return self.after(F.relu(y).mean((2, 3)) * self.scale)


@toy
def partial() -> Toy:
    return Toy(Partial(), (torch.randn(2, 2, 3, 3),))


class Preactivated(nn.Module):
    """Batch norms that come before a layer, after a concatenation, and after a linear layer on
    sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 2, 1),
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
        )
        self.joined, self.identity = nn.BatchNorm2d(6), nn.Identity()
        self.linear, self.last = nn.Linear(16, 5), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.identity(F.relu(self.first(x)))
        y = F.relu(self.joined(torch.cat([self.a(x), self.b(x)], 1)))
        return self.last(self.linear(y.flatten(2)))


@toy
def preactivated() -> Toy:
    return Toy(Preactivated(), (torch.randn(2, 3, 4, 4),))


class Products(nn.Module):
    """Layers written as products with trained matrices, one of them used twice; one product is
    scaled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(4, 6)),
            nn.Parameter(torch.randn(6, 4)),
        )
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.shift, x, self.first)
        y = F.relu(y) @ self.second
        return torch.addmm(self.shift, y, self.first, alpha=0.5) + torch.addmm(
            self.shift, y, self.first
        )


@toy
def products() -> Toy:
    return Toy(Products(), (torch.randn(2, 4),))
