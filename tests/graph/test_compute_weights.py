"""Weights that the model computes from its own tensors become the layers' own; what inputs
decide stays apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.extended import one_of_each
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

import quantizer
from quantizer.config.model import Settings
from quantizer.graph.passes import run_passes
from quantizer.graph.passes.compute_constants import compute_weights
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in many models
        normed: nn.Module = weight_norm(layer)
    return normed


class Half(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5 + weight.flip(0) * 0.1


def halved(layer: nn.Module) -> nn.Module:
    nn.utils.parametrize.register_parametrization(layer, "weight", Half())
    nn.utils.parametrize.register_parametrization(layer, "bias", Half())
    return layer


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": old_weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "own": halved,
    "orthogonal": parametrizations.orthogonal,
}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 5),
    "convolution": lambda: nn.Conv1d(4, 4, 3),
    "transposed": lambda: nn.ConvTranspose1d(4, 4, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layer"), one_of_each([(kind, layer) for layer in LAYERS] for kind in KINDS)
)
def test_a_parametrized_layer_owns_its_weight(kind: str, layer: str) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(KINDS[kind](LAYERS[layer]()), nn.ReLU()).eval(),
        torch.randn(3, 4, 5),
    )
    graph = compute_weights(trace(model, (x,)))
    assert [node.op for node in graph.nodes][0::2] == ["input", "relu"]
    first = graph.nodes[1]
    assert set(first.params) == {"weight", "bias"}
    assert set(graph.absorbed.values()) == {first.name}
    assert compute_weights(graph) == graph
    with torch.no_grad():
        assert torch.allclose(Network(graph)(x), model(x), rtol=0, atol=1e-6)


def test_a_batch_norm_folds_into_a_computed_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)
    ).eval()
    graph = run_passes(trace(model, (torch.randn(2, 3, 6, 6),)), Settings())
    assert [node.op for node in graph.nodes] == ["input", "conv2d"]


class Twice(nn.Module):
    """One computed weight for two layers, and as a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.tanh(self.weight)
        return F.linear(F.relu(F.linear(x, weight)), weight), weight * x.mean()


def test_what_others_read_stays() -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(3, 4)
    graph = compute_weights(trace(model, (x,)))
    assert [set(node.params) for node in graph.nodes if node.op == "linear"] == [
        {"weight"},
        {"weight"},
    ]
    assert "tanh" in [node.op for node in graph.nodes]
    with torch.no_grad():
        for found, expected in zip(Network(graph)(x), model(x), strict=True):
            assert torch.equal(found, expected)


class Flow(nn.Module):
    """Steps of a flow: rare operators that read the model's own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.randn(4, 4))
        self.generator = nn.Parameter(torch.randn(4, 4))
        self.signal = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ torch.linalg.inv(self.mixing)
        y = y @ torch.matrix_exp(self.generator - self.generator.T)
        return y, y * torch.fft.rfft(self.signal).abs(), torch.linalg.slogdet(self.mixing)[1]


def test_rare_operators_on_the_models_own_tensors_run_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Flow().eval(), torch.randn(3, 4)
    graph = run_passes(trace(model, (x,)), Settings())
    operators = [node.op for node in graph.nodes]
    assert operators == [
        "input",
        "constant",
        "matmul",
        "linear",
        "parameter",
        "mul",
        "constant",
    ]
    with torch.no_grad():
        torch.testing.assert_close(Network(graph)(x), model(x))
    pytest.importorskip("onnxruntime", reason="--to onnx needs quantizer-torch[onnx]")
    result = quantizer.quantize(model, [x, x + 1], to="onnx", folder=tmp_path)
    assert result.verification.sqnr_db > 60  # type: ignore[operator]


class CrossAttention(nn.Module):
    """torch computes the three biases from one parameter where keys and values have widths of
    their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=False)[0]  # type: ignore[no-any-return]


def test_projections_of_several_widths_own_their_parts_of_one_bias() -> None:
    torch.manual_seed(0)
    model = CrossAttention().eval()
    nn.init.normal_(model.attention.in_proj_bias)
    batches = [
        (torch.randn(2, 5, 8), torch.randn(2, 7, 4), torch.randn(2, 7, 6)) for _ in range(2)
    ]
    graph = run_passes(trace(model, batches[0]), Settings())
    assert [set(node.params) for node in graph.nodes if node.op == "linear"] == [
        {"weight", "bias"}
    ] * 4
    config = {
        "global_quant_config": {
            "weight": {"dtype": "int8"},
            "output_tensors": {"dtype": "int8"},
        }
    }
    assert quantizer.calibrate(model, config, batches).test(batches).metrics["sqnr_db"] > 25


class Conditioned(nn.Module):
    """Biases that another input decides, of a convolution and of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear, self.shifts = (
            nn.Conv2d(3, 4, 3),
            nn.Linear(4, 6),
            nn.Linear(5, 10),
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        first, second = self.shifts(condition).split([4, 6])
        features = F.conv2d(x, self.convolution.weight, first, padding=1).relu().mean([2, 3])
        return F.linear(features, self.linear.weight, second)


@pytest.mark.slow
def test_biases_that_the_input_decides_are_added_apart(tmp_path: Path) -> None:
    """So that bias correction finds a bias of its own in the layer, and files and test mode add
    the same.
    """
    torch.manual_seed(0)
    model, batches = (
        Conditioned().eval(),
        [(torch.randn(4, 3, 6, 6), torch.randn(5)) for _ in range(2)],
    )
    graph = run_passes(trace(model, batches[0]), Settings())
    kept = [
        node.name.rpartition("/")[2]
        for node in graph.nodes
        if node.op in ("conv2d", "linear", "add", "reshape")
    ]
    assert kept == ["linear", "conv2d", "conv2d_bias", "conv2d_add", "linear", "linear_add"]
    result = quantizer.calibrate(model, ROOT / "configs" / "cpu_int8.json", batches)
    assert result.test(batches).metrics["sqnr_db"] > 25
    pytest.importorskip("onnxruntime", reason="--to onnx needs quantizer-torch[onnx]")
    assert result.export("onnx", tmp_path / "net.onnx").equal == 1


def test_a_weight_that_the_input_decides_stays_computed() -> None:
    class Dynamic(Twice):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.linear(x, self.weight * x.mean())

    graph = trace(Dynamic().eval(), (torch.randn(3, 4),))
    assert compute_weights(graph) == graph
