"""What every pass must keep, and what folding and converting are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import config, document, layer
from support.toys import TOYS, built, leaves_equal, shake, traced
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from quantizer.config.model import Settings
from quantizer.graph.ir import Graph
from quantizer.graph.passes import GRAPH_PASSES, load_pass, run_passes
from quantizer.graph.passes.fold_batch_norm import fold_batch_norm
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_pass_keeps_the_function_and_the_names(name: str) -> None:
    graph = traced(name)
    args, kwargs = built(name).call(3 if built(name).batched else 2)
    with torch.no_grad():
        before = Network(graph)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    for rewrite, row in GRAPH_PASSES.items():
        after = load_pass(rewrite)(graph)
        survivors = [node.name for node in after.nodes if node.name in graph.by_name]
        assert survivors == [node.name for node in graph.nodes if node.name in after.by_name]
        assert {node.name for node in graph.nodes} - set(survivors) == set(after.absorbed)
        assert load_pass(rewrite)(after) == after, rewrite
        if row.changes != "nothing" or is_same(after, graph):
            continue
        with torch.no_grad():
            found = Network(after)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        assert leaves_equal(found, before, row.tolerance * largest(before)), rewrite


def is_same(after: Graph, before: Graph) -> bool:
    """Whether a pass has changed neither nodes nor tensors."""
    tensors = [after.tensors.get(path) is tensor for path, tensor in before.tensors.items()]
    return after.nodes == before.nodes and all(tensors)


def largest(output: Any) -> float:
    """The largest magnitude in an output, at least 1."""
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return max(
        [1.0, *(float(t[t.isfinite()].abs().max()) for t in tensors if t.isfinite().any())]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_pass_leaves_the_traced_tensors_alone(name: str) -> None:
    before = {path: tensor.clone() for path, tensor in traced(name).tensors.items()}
    for rewrite in GRAPH_PASSES:
        load_pass(rewrite)(traced(name))
        assert leaves_equal(dict(traced(name).tensors), before), rewrite


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_all_passes_together_keep_the_function(name: str) -> None:
    after = run_passes(traced(name), Settings(include_cle=True), device=False)
    args, kwargs = built(name).call(3 if built(name).batched else 2)
    with torch.no_grad():
        before = Network(traced(name))(*args, **kwargs)
        tolerance = GRAPH_PASSES["absorb_high_biases"].tolerance * largest(before)
        assert leaves_equal(Network(after)(*copy.deepcopy(args), **kwargs), before, tolerance)


def test_what_cannot_fold_is_quantized_and_found_by_its_type(tmp_path: Path) -> None:
    entry = layer(type="torch.nn.BatchNorm2d", tensor={"weights": {"bit_width": 16}})
    found = config(tmp_path, document(entry))
    graph = run_passes(traced("preactivated"), found.settings)
    assert [node.op for node in graph.nodes if "norm" in node.name] == [
        "channel_scale",
        "channel_scale",
    ]
    plan = resolve_plan(found, graph, traced("preactivated"))
    planned = {
        role: tensor.spec.bit_width
        for role, tensor in plan.of_layer(graph.nodes[1].name).items()
    }
    assert planned == {"weights": 16, "bias": 8}
    assert graph.nodes[1].name in plan.rules[-1].layers


def folded(module: nn.Module, *shape: int) -> tuple[Graph, float]:
    """The folded graph, and how far its output is from the model's relative to the model's
    largest value.
    """
    torch.manual_seed(1)
    shake(module)
    x = torch.randn(*shape)
    graph = fold_batch_norm(trace(module, (x,)))
    with torch.no_grad():
        expected = module(x)
        error = (Network(graph)(x) - expected).abs().max() / expected.abs().max()
    return graph, float(error)


FOLDABLE: list[tuple[str, Callable[[], list[nn.Module]], tuple[int, ...]]] = [
    ("conv1d", lambda: [nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)], (2, 4, 9)),
    ("conv2d", lambda: [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)], (2, 4, 5, 5)),
    ("conv3d", lambda: [nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6)], (2, 4, 3, 3, 3)),
    ("no bias", lambda: [nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)], (2, 4, 5, 5)),
    ("depthwise", lambda: [nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)], (2, 4, 5, 5)),
    ("transposed 1d", lambda: [nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6)], (2, 4, 5)),
    (
        "transposed 2d",
        lambda: [nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)],
        (2, 4, 5, 5),
    ),
    (
        "transposed 3d",
        lambda: [nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d(6)],
        (2, 4, 2, 2, 2),
    ),
    (
        "transposed groups",
        lambda: [nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)],
        (2, 4, 5, 5),
    ),
    ("linear", lambda: [nn.Linear(4, 6), nn.BatchNorm1d(6)], (3, 4)),
    ("no affine", lambda: [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)], (2, 4, 5, 5)),
    ("large eps", lambda: [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=0.5)], (2, 4, 5, 5)),
    (
        "dropout between",
        lambda: [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Dropout()],
        (2, 4, 5, 5),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "shape"), [row[1:] for row in FOLDABLE], ids=[row[0] for row in FOLDABLE]
)
def test_batch_norm_folds(
    layers: Callable[[], list[nn.Module]], shape: tuple[int, ...]
) -> None:
    graph, error = folded(nn.Sequential(*layers()), *shape)
    assert "batch_norm" not in [node.op for node in graph.nodes]
    assert len(graph.absorbed) == 1
    assert error < 1e-5


class Moved(nn.Module):
    """A batch norm behind a linear layer whose outputs are moved; `reads` is what else reads
    them.
    """

    def __init__(
        self,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor, Tensor], Tensor] = lambda x, y: x,
        features: int = 6,
        reads: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 6), nn.BatchNorm1d(features)
        self.there, self.back, self.reads = there, back, reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.back(self.bn(self.there(y)), y) + self.reads(y).mean()


MOVES: list[tuple[str, Callable[[], Moved]]] = [
    # As in LeViT
    ("rows together", lambda: Moved(lambda y: y.flatten(0, 1), lambda x, y: x.reshape_as(y))),
    ("viewed back", lambda: Moved(lambda y: y.view(-1, 6), lambda x, y: x.view_as(y))),
    # PatchTST
    (
        "channels second",
        lambda: Moved(lambda y: y.transpose(1, 2), lambda x, y: x.transpose(1, 2)),
    ),
    ("twice", lambda: Moved(lambda y: y.permute(0, 2, 1).reshape(-1, 6, 5))),
    ("the first token", lambda: Moved(lambda y: y[:, 0])),
]


@pytest.mark.parametrize("model", [row[1] for row in MOVES], ids=[row[0] for row in MOVES])
def test_batch_norm_folds_behind_what_only_moves_values(model: Callable[[], Moved]) -> None:
    graph, error = folded(model(), 2, 5, 4)
    assert not {"batch_norm", "channel_scale"} & {node.op for node in graph.nodes}
    assert list(graph.absorbed.values()) == ["Moved::Moved/Linear[linear]/linear"]
    assert error < 1e-5


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + y


class ComputedWeight(TwoReaders):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(F.conv2d(x, self.conv.weight * 2))


class Joined(nn.Module):
    """A batch norm after a concatenation of two convolutions."""

    def __init__(self, *, dim: int = 1, outside: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.dim, self.outside, self.twice = dim, outside, twice
        self.a, self.b = nn.Conv2d(4, 2, 1, bias=False), nn.Conv2d(4, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(4 if dim == 1 and not outside else 2 if dim == 2 else 6)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = a if self.twice else x if self.outside else self.b(x)
        return F.relu(self.bn(torch.cat([a, b], self.dim)))


@pytest.mark.parametrize("dim", [1, -3])
def test_batch_norm_folds_through_a_concatenation(dim: int) -> None:
    model = Joined()
    model.dim = dim
    graph, error = folded(model, 2, 4, 4, 4)
    assert [node.op for node in graph.nodes] == ["input", "conv2d", "conv2d", "cat", "relu"]
    assert list(graph.absorbed.values()) == ["Joined::Joined/cat"]
    assert torch.equal(
        torch.cat([mean for mean, _ in graph.normal.values()]), model.bn.bias.detach().double()
    )
    assert error < 1e-5


class JoinedAndMoved(nn.Module):
    """A batch norm after a concatenation of two linear layers: channels become the second axis
    before it or after.
    """

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.a, self.b, self.bn, self.first = (
            nn.Linear(4, 2),
            nn.Linear(4, 3),
            nn.BatchNorm1d(5),
            first,
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return self.bn(torch.cat([a.mT, b.mT], 1) if self.first else torch.cat([a, b], -1).mT)


@pytest.mark.parametrize("first", [True, False])
def test_batch_norm_folds_through_a_concatenation_and_moves(first: bool) -> None:
    graph, error = folded(JoinedAndMoved(first=first), 2, 6, 4)
    assert not {"batch_norm", "channel_scale"} & {node.op for node in graph.nodes}
    assert error < 1e-5


NOT_FOLDABLE: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    (
        "after pooling",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(2), nn.BatchNorm2d(4)),
        (2, 4, 4, 4),
    ),
    (
        "after relu",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)),
        (2, 4, 4, 4),
    ),
    ("first layer", lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)), (2, 4, 4, 4)),
    ("two readers", TwoReaders, (2, 4, 4, 4)),
    ("computed weight", ComputedWeight, (2, 4, 4, 4)),
    ("linear on 3-D", lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)), (2, 5, 4)),
    ("joined with another tensor", lambda: Joined(outside=True), (2, 4, 4, 4)),
    ("joined in rows", lambda: Joined(dim=2), (2, 4, 4, 4)),
    ("joined with itself", lambda: Joined(twice=True), (2, 4, 4, 4)),
    ("padded", lambda: Moved(lambda y: F.pad(y.flatten(0, 1), (0, 0, 1, 1))), (2, 5, 4)),
    ("moved within channels", lambda: Moved(lambda y: y.flatten(0, 1).flip(1)), (2, 5, 4)),
    ("heads apart", lambda: Moved(lambda y: y.view(-1, 2, 3), features=2), (2, 5, 4)),
    ("tokens as channels", lambda: Moved(lambda y: y.permute(0, 1, 2), features=5), (2, 5, 4)),
    ("moved and read", lambda: Moved(lambda y: y.flatten(0, 1), reads=torch.abs), (2, 5, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"), [row[1:] for row in NOT_FOLDABLE], ids=[row[0] for row in NOT_FOLDABLE]
)
def test_batch_norm_becomes_a_scale_where_it_cannot_fold(
    model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    graph, error = folded(model(), *shape)
    (scale,) = (node for node in graph.nodes if node.op == "channel_scale")
    assert scale.name.endswith("/batch_norm")
    assert set(scale.params) == {"weight", "bias"}
    assert not graph.absorbed
    assert error < 1e-6


def test_batch_norm_of_the_batch_itself_stays() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    graph, error = folded(model, 2, 4, 4, 4)
    assert [node.op for node in graph.nodes] == ["input", "conv2d", "batch_norm"]
    assert error < 1e-6


class SharedWeight(nn.Module):
    """One convolution, called twice, each time with a batch norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv(F.relu(self.bn1(self.conv(x)))))


def test_a_shared_weight_is_folded_for_each_call_apart() -> None:
    graph, error = folded(SharedWeight(), 2, 4, 3, 3)
    weights = [node.params["weight"] for node in graph.nodes if node.op == "conv2d"]
    assert len(set(weights)) == 2
    assert error < 1e-5


class OneBare(SharedWeight):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(self.bn1(self.conv(x))))


def test_a_shared_weight_keeps_its_values_where_no_norm_follows() -> None:
    graph, error = folded(OneBare(), 2, 4, 3, 3)
    assert "batch_norm" not in [node.op for node in graph.nodes]
    assert error < 1e-5


class ClippedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu6, self.silu = nn.ReLU6(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.relu6(x * 10)) + F.silu(self.silu(x))


@pytest.mark.parametrize(
    ("rewrite", "expected"),
    [
        ("convert_relu6_to_relu", lambda x: F.relu(x * 10) + F.silu(F.silu(x))),
        ("convert_silu_to_hswish", lambda x: F.relu6(x * 10) + F.hardswish(F.hardswish(x))),
    ],
)
def test_conversions_take_modules_and_functions(
    rewrite: str, expected: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5) * 2
    graph = trace(ClippedTwice(), (x,))
    after = load_pass(rewrite)(graph)
    assert [node.name for node in after.nodes] == [node.name for node in graph.nodes]
    with torch.no_grad():
        torch.testing.assert_close(Network(after)(x), expected(x))
