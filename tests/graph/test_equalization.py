"""Cross-layer equalization keeps the float function and restores skewed networks; which layers
make a pair.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.extended import extended

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toys import shake
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.algorithms.equalization.absorption import absorb_high_biases
from quantizer.algorithms.equalization.equalization import (
    MIN_EXPONENT,
    cross_layer_equalization,
    find_pairs,
)
from quantizer.calibration import observing
from quantizer.calibration.solution import quantized_network
from quantizer.config.diagnostics import Sourced
from quantizer.config.model import ConfigRule, ResolvedConfig, Selector, Settings
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes, summary
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
CLE, PLAIN = Settings(include_cle=True), Settings()


@pytest.fixture(scope="module")
def mobile() -> dict[str, Any]:
    """The names of examples/digits_mobile.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return runpy.run_path(str(EXAMPLES / "digits_mobile.py"))


def with_weights_only(original: Graph, graph: Graph, **fields: object) -> Network:
    """The network with its weights quantized per tensor, which needs no data."""
    values = {name: Sourced(value) for name, value in fields.items()}
    rule = ConfigRule(
        Selector("all"), "overall", frozenset(("weights",)), fields={"weights": values}
    )
    plan = resolve_plan(ResolvedConfig(PLAIN, (rule,)), graph, original)
    return quantized_network(
        graph, observing.observed_solution(observing.create_observers(plan))
    )


@torch.no_grad()
def accuracy(mobile: dict[str, Any], network: nn.Module) -> float:
    result: float = mobile["evaluate"](network, mobile["evaluation_data"]())["top1"]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("reach", [8.0, *extended(4.0, 6.0)])
def test_equalization_restores_a_network_with_skewed_channels(
    mobile: dict[str, Any], reach: float
) -> None:
    """Nagel et al. 2019, table 1: MobileNetV2 at 8 bits per tensor goes from 0.12 % to 69.91 of
    71.72 %.
    """
    skewed, images = mobile["skewed"](reach).eval(), mobile["evaluation_data"]()[0][0]
    graph = trace(skewed, (images,))
    plain, equalized = run_passes(graph, PLAIN), run_passes(graph, CLE)
    exact = accuracy(mobile, skewed)
    assert exact == pytest.approx(0.986)
    assert accuracy(mobile, with_weights_only(graph, plain)) <= (0.25 if reach == 4 else 0.2)
    assert accuracy(mobile, with_weights_only(graph, equalized)) >= exact - 0.01
    with torch.no_grad():
        assert (Network(equalized)(images) - skewed(images)).abs().max() < 1e-4


def test_powers_of_two_cost_little_at_8_bits_and_much_at_4(mobile: dict[str, Any]) -> None:
    """Vitis AI and Brevitas report the same."""
    network = mobile["model"]().eval()
    graph = trace(network, (mobile["evaluation_data"]()[0][0],))
    found = {
        (bits, scale): accuracy(
            mobile,
            with_weights_only(
                graph,
                run_passes(graph, PLAIN),
                bit_width=bits,
                scale_type=scale,
                symmetric=True,
            ),
        )
        for bits in (8, 4)
        for scale in ("float", "poweroftwo")
    }
    assert abs(found[8, "poweroftwo"] - found[8, "float"]) <= 0.005
    assert found[4, "poweroftwo"] <= found[4, "float"] - 0.05


def conv(inputs: int, outputs: int, kernel: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **options)


class Readers(nn.Module):
    """A convolution that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 4), conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.b(y) + y


class Twice(nn.Module):
    """A convolution that is called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 3), conv(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(F.relu(self.a(x)))))


class Means(nn.Module):
    """Channels last, then the mean over positions, with and without the dimensions."""

    def __init__(self, *, keepdim: bool) -> None:
        super().__init__()
        self.a, self.b, self.keepdim = conv(3, 4), nn.Linear(4, 2), keepdim

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)).permute(0, 2, 3, 1).mean((1, 2), self.keepdim))


class Through(nn.Module):
    """Two linear layers around a function of the first one's output and of the input."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], reads: int = 6) -> None:
        super().__init__()
        self.between, self.a, self.b = between, nn.Linear(6, 6), nn.Linear(reads, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x), x))


class Returned(Readers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = self.a(x)
        return self.b(y), y


IMAGE, LINE, CUBE = (2, 3, 6, 6), (2, 3, 8), (2, 3, 4, 4, 4)
FOUND: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], int]] = {
    "relu": (lambda: [conv(3, 4), nn.ReLU(), conv(4, 2, 3)], IMAGE, 1),
    "nothing between": (lambda: [conv(3, 4), conv(4, 2)], IMAGE, 1),
    "leaky relu and dropout": (
        lambda: [conv(3, 4), nn.LeakyReLU(0.1), nn.Dropout(), conv(4, 2)],
        IMAGE,
        1,
    ),
    "one slope": (lambda: [conv(3, 4), nn.PReLU(), conv(4, 2)], IMAGE, 1),
    "a slope per channel": (lambda: [conv(3, 4), nn.PReLU(4), conv(4, 2)], IMAGE, 1),
    "relu6": (lambda: [conv(3, 4), nn.ReLU6(), conv(4, 2)], IMAGE, 0),
    "hardtanh": (lambda: [conv(3, 4), nn.Hardtanh(), conv(4, 2)], IMAGE, 0),
    "silu": (lambda: [conv(3, 4), nn.SiLU(), conv(4, 2)], IMAGE, 0),
    "pools": (
        lambda: [conv(3, 4), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), conv(4, 2)],
        IMAGE,
        1,
    ),
    "padding": (
        lambda: [conv(3, 4), nn.ZeroPad2d(1), nn.ReflectionPad2d(1), conv(4, 2, 3)],
        IMAGE,
        1,
    ),
    "padding with a constant": (
        lambda: [conv(3, 4), nn.ConstantPad2d(1, 0.5), conv(4, 2)],
        IMAGE,
        0,
    ),
    "padded channels": (
        lambda: [conv(3, 4), nn.ZeroPad3d((0, 0, 0, 0, 1, 0)), conv(5, 2)],
        IMAGE,
        0,
    ),
    "upsampling": (
        lambda: [conv(3, 4), nn.Upsample(scale_factor=2), nn.ReLU(), conv(4, 2)],
        IMAGE,
        1,
    ),
    "pool and linear": (
        lambda: [conv(3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)],
        IMAGE,
        1,
    ),
    "a run of columns per channel": (
        lambda: [conv(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)],
        IMAGE,
        1,
    ),
    "flattened without the channels": (
        lambda: [conv(3, 4), nn.Flatten(2), nn.Linear(36, 2)],
        IMAGE,
        0,
    ),
    "flattened with the batch": (
        lambda: [conv(3, 4), nn.Flatten(0, 1), nn.Flatten(1), nn.Linear(36, 2)],
        IMAGE,
        0,
    ),
    "linear over positions": (lambda: [conv(3, 4), nn.Linear(6, 2)], IMAGE, 0),
    "linear layers": (
        lambda: [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 2)],
        IMAGE,
        2,
    ),
    "depthwise in the middle": (
        lambda: [
            conv(3, 4),
            nn.ReLU(),
            conv(4, 8, 3, groups=4),
            nn.ReLU(),
            conv(8, 2, bias=False),
        ],
        IMAGE,
        2,
    ),
    "groups": (lambda: [conv(3, 6, groups=3), nn.ReLU(), conv(6, 4, 3, groups=2)], IMAGE, 1),
    "pixels as channels of groups": (
        lambda: [
            conv(3, 4),
            nn.Flatten(),
            nn.Unflatten(1, (144, 1, 1)),
            conv(144, 4, groups=2),
        ],
        IMAGE,
        1,
    ),
    "transposed": (
        lambda: [
            nn.ConvTranspose2d(3, 4, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
            nn.ReLU(),
            conv(6, 2),
        ],
        IMAGE,
        2,
    ),
    "1-D": (
        lambda: [nn.Conv1d(3, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 2, 1)],
        LINE,
        1,
    ),
    "3-D": (
        lambda: [nn.Conv3d(3, 4, 2), nn.ReLU(), nn.AvgPool3d(2), nn.Conv3d(4, 2, 1)],
        CUBE,
        1,
    ),
    "batch norms": (
        lambda: [conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 2), nn.BatchNorm2d(2)],
        IMAGE,
        1,
    ),
    "a batch norm that stays": (
        lambda: [conv(3, 4), nn.ReLU(), nn.BatchNorm2d(4), conv(4, 2)],
        IMAGE,
        0,
    ),
    "identity": (
        lambda: [conv(3, 4), nn.Identity(), nn.ReLU(), nn.Identity(), conv(4, 2)],
        IMAGE,
        1,
    ),
    "two readers": (lambda: [Readers()], IMAGE, 0),
    "returned as well": (lambda: [Returned()], IMAGE, 0),
    "called twice": (lambda: [Twice()], IMAGE, 0),
    "mean of channels last": (lambda: [Means(keepdim=False)], IMAGE, 1),
    "maxima and linear": (
        lambda: [conv(3, 4), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)],
        IMAGE,
        1,
    ),
    "shuffled channels": (
        lambda: [conv(3, 4), nn.ReLU(), nn.ChannelShuffle(2), conv(4, 2)],
        IMAGE,
        1,
    ),
    "some channels": (lambda: [Through(lambda y, x: y[..., 1:4], reads=3)], IMAGE, 1),
    "channels several times": (
        lambda: [Through(lambda y, x: y.repeat_interleave(2, -1), reads=12)],
        IMAGE,
        1,
    ),
    "a gate": (lambda: [Through(lambda y, x: y * torch.sigmoid(x))], IMAGE, 1),
    "attention": (
        lambda: [Through(lambda y, x: F.scaled_dot_product_attention(x, x, y))],
        IMAGE,
        1,
    ),
    "a sum with its rectified self": (lambda: [Through(lambda y, x: F.relu(y) + y)], IMAGE, 1),
    "a sum with the input": (lambda: [Through(lambda y, x: y + x)], IMAGE, 0),
    "mean that keeps dimensions": (lambda: [Means(keepdim=True)], IMAGE, 1),
}


def skew(module: nn.Module) -> nn.Module:
    """Every channel of every weight scaled by 2^U(-6, 6), in float64."""
    torch.manual_seed(0)
    for parameter in shake(module).double().parameters():
        if parameter.dim() > 1:
            parameter.data *= 2 ** (
                torch.rand(len(parameter), *[1] * (parameter.dim() - 1)) * 12 - 6
            )
    return module


def deviation(module: nn.Module, network: Network, x: Tensor) -> float:
    """The largest difference of an output relative to the largest output."""
    with torch.no_grad():
        before, after = module(x), network(x)
    pairs = zip(before, after, strict=True) if isinstance(before, tuple) else [(before, after)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_pairs_are_found_and_equalized_without_changing_the_function(name: str) -> None:
    make, shape, count = FOUND[name]
    module, x = skew(nn.Sequential(*make())), torch.randn(*shape, dtype=torch.float64)
    graph = run_passes(trace(module, (x,)), PLAIN)
    pairs = find_pairs(graph)
    assert len(pairs) == count
    after = cross_layer_equalization(graph)
    assert {change.layers for change in after.changes} == {
        (pair.first.name, pair.second.name) for pair in pairs
    }
    assert [node.name for node in after.nodes] == [node.name for node in graph.nodes]
    assert deviation(module, Network(after), x) < 1e-12


def ranges(graph: Graph) -> list[Tensor]:
    """log2 of the ratio of the ranges of each pair's channels."""
    found = []
    for pair in find_pairs(graph):
        first, second = (
            by_channel(n, graph.tensors[n.params["weight"]]) for n in (pair.first, pair.second)
        )
        r1 = first.abs().amax((2, 3)).flatten()
        columns = second.abs().amax((1, 3)).flatten()
        r2 = torch.zeros_like(r1).scatter_reduce(
            0, torch.tensor(pair.channels), columns, "amax"
        )
        found.append((r1 / r2).log2())
    return found


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "pointwise": lambda inputs, outputs: nn.Conv2d(inputs, outputs, 1, bias=False),
    "spatial": lambda inputs, outputs: nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
    "depthwise": lambda inputs, _: nn.Conv2d(
        inputs, 2 * inputs, 3, padding=1, groups=inputs, bias=False
    ),
    "transposed": lambda inputs, outputs: nn.ConvTranspose2d(
        inputs, outputs, 2, groups=2, bias=False
    ),
}
BETWEEN: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.Identity,
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.MaxPool2d(2, 1),
]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(LAYERS)),
            st.sampled_from((2, 4, 6)),
            st.sampled_from(BETWEEN),
        ),
        min_size=2,
        max_size=5,
    )
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_chain_is_balanced_and_keeps_its_function(
    chain: list[tuple[str, int, Callable[[], nn.Module]]],
) -> None:
    layers: list[nn.Module] = [nn.Conv2d(2, 2, 1, bias=False)]
    channels = 2
    for kind, width, between in chain:
        layers += [LAYERS[kind](channels, width), between()]
        channels = layers[-2].out_channels  # type: ignore[assignment]
    module, x = skew(nn.Sequential(*layers)), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    graph = trace(module, (x,))
    after = cross_layer_equalization(graph)
    assert len(ranges(after)) == len(chain)
    assert max(float(ratio.abs().max()) for ratio in ranges(after)) <= 4 * MIN_EXPONENT
    assert deviation(module, Network(after), x) < 1e-12


def test_the_factor_is_that_of_the_paper() -> None:
    """Nagel et al. 2019, equation 11: s = sqrt(r1 r2) / r2, so the ranges become sqrt(r1
    r2).
    """
    module = nn.Sequential(nn.Linear(1, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    module[0].weight.data = torch.tensor([[16.0], [-1.0], [0.0]])
    module[2].weight.data = torch.tensor([[1.0, 4.0, 5.0]])
    after = cross_layer_equalization(trace(module, (torch.randn(2, 1),)))
    assert after.tensors["0.weight"].flatten().tolist() == [4.0, -2.0, 0.0]
    assert after.tensors["2.weight"].flatten().tolist() == [4.0, 2.0, 5.0]
    assert [change.amount for change in after.changes] == [2.0]
    assert summary(after) == ["pairs of layers equalized: 1; largest factor 2^2.0"]


def test_a_channel_with_hardly_any_weight_does_not_take_the_bias_scale() -> None:
    module = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    module[0].weight.data, module[0].bias.data = (
        torch.tensor([[1.0], [1e-30]]),
        torch.tensor([0.5, 1.0]),
    )
    after = cross_layer_equalization(trace(module, (torch.randn(2, 1),)))
    assert after.tensors["0.bias"].abs().max() < 2


def absorbable(*between: nn.Module, second: nn.Module, mean: float = 10.0) -> nn.Module:
    """A convolution whose output is known to be normal(mean, 1) in its first channel and
    normal(0, 1) in the others.
    """
    first = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
    for parameter, values in (
        (first[1].bias, (mean, 0, 0, 0)),
        (first[1].weight, (1, 1, 1, 1)),
    ):
        parameter.data = torch.tensor(values, dtype=torch.float32)
    return nn.Sequential(*first, *between, second).double().eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "second", "moves"),
    [
        ([nn.ReLU()], nn.Conv2d(4, 2, 3), True),
        (
            [nn.ReLU(), nn.AvgPool2d(2), nn.MaxPool2d(2, padding=1)],
            nn.Conv2d(4, 2, 1, groups=2, bias=False),
            True,
        ),
        ([nn.ReLU(), nn.AvgPool2d(3, 1), nn.Flatten()], nn.Linear(64, 2), True),
        ([nn.ReLU()], nn.Conv2d(4, 2, 3, padding=1), False),
        ([nn.ReLU()], nn.Conv2d(4, 2, 3, padding="same"), False),
        ([nn.ReLU(), nn.ZeroPad2d(1)], nn.Conv2d(4, 2, 3), False),
        ([nn.ReLU(), nn.AvgPool2d(2, padding=1)], nn.Conv2d(4, 2, 1), False),
        ([nn.ReLU(), nn.AvgPool2d(2, divisor_override=3)], nn.Conv2d(4, 2, 1), False),
        ([nn.LeakyReLU()], nn.Conv2d(4, 2, 1), False),
        ([nn.Identity()], nn.Conv2d(4, 2, 1), False),
        ([nn.ReLU()], nn.ConvTranspose2d(4, 2, 2), False),
    ],
)
def test_high_biases_move_only_where_a_shift_comes_through(
    between: list[nn.Module], second: nn.Module, moves: bool
) -> None:
    torch.manual_seed(0)
    module = absorbable(*between, second=second)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    graph = run_passes(trace(module, (x,)), PLAIN)
    after = absorb_high_biases(graph)
    assert bool(after.changes) == moves
    assert absorb_high_biases(after) is after
    assert deviation(module, Network(after), x) < 1e-12
    (mean, _), *_ = after.normal.values()
    # The first channel reaches 13, the others 3: it can give up mean - 3 std = 7 of its 13.
    assert mean.tolist() == [3.0 if moves else 10.0, 0, 0, 0]


def test_no_bias_moves_that_would_not_lower_the_range_of_all() -> None:
    module = absorbable(nn.ReLU(), second=nn.Conv2d(4, 2, 1))
    module[1].weight.data[1] = 5.0  # reaches 15, all by its width
    graph = run_passes(trace(module, (torch.randn(2, 3, 6, 6, dtype=torch.float64),)), PLAIN)
    assert absorb_high_biases(graph) is graph
