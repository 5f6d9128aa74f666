"""The paired run: what is compared with what."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.engine.evaluate import Noise, compare
from quantizer.engine.solution import Solution, quantized_network
from quantizer.errors import DataError
from quantizer.graph.trace import trace
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.fake_quantize import fake_quantize
from quantizer.sources.batches import Batch

COARSE = QuantizedTensor(QuantizationSpec(bit_width=4), torch.tensor(0.25))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def batches(*tensors: Tensor) -> list[Batch]:
    return [Batch((x,), {}, None, x) for x in tensors]


def rounded(x: Tensor) -> Tensor:
    return fake_quantize(x, COARSE.scale, COARSE.zero_point, -8, 7, "half_even")


def test_noise_of_a_graph_input() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    graph = trace(Doubled(), (x,))
    quantized = quantized_network(graph, Solution({("Doubled::input_0", "input"): COARSE}))
    found = compare(Network(graph), quantized, batches(x))
    expected = 10 * math.log10(float(x.square().sum() / (x - rounded(x)).square().sum()))
    (row,) = found.layers
    assert row.local.sqnr_db == pytest.approx(expected)
    assert row.accumulated is not None
    assert row.accumulated.sqnr_db == pytest.approx(expected)
    assert found.metrics()["sqnr_db"] == pytest.approx(expected)


def test_a_layers_own_input_quantizer_leaves_other_readers_alone() -> None:
    """`x + x` with its second argument alone quantized."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    graph = trace(Doubled(), (x,))
    quantized = quantized_network(graph, Solution({("Doubled::Doubled/add", "input_1"): COARSE}))
    assert torch.equal(quantized(x), x + rounded(x))
    found = compare(Network(graph), quantized, batches(x))
    assert [(row.layer, row.role) for row in found.layers] == [("Doubled::Doubled/add", "input_1")]
    assert math.isfinite(found.layers[0].local.sqnr_db)


def test_agreement_counts_samples_over_batches() -> None:
    x = torch.tensor([[0.30, 0.20, 0.0], [1.0, 0.1, 0.0]])
    graph = trace(Doubled(), (x,))
    quantized = quantized_network(graph, Solution({("Doubled::input_0", "input"): COARSE}))
    found = compare(Network(graph), quantized, batches(x, x[1:], x[1:]))
    assert found.metrics()["top1_agreement"] == 1.0
    # Onto multiples of 0.25: (.30, .37) becomes a tie that the first class wins, (.37, .38) stays apart.
    close = torch.tensor([[0.30, 0.37, 0.0], [0.37, 0.38, 0.0]])
    found = compare(Network(graph), quantized, batches(close, close[:1]))
    assert found.metrics()["top1_agreement"] == pytest.approx(1 / 3)


def test_no_data_and_no_finite_output_are_errors() -> None:
    x = torch.full((4, 3), 3e38)
    graph = trace(Doubled(), (x,))
    with pytest.raises(DataError, match="no batches"):
        compare(Network(graph), Network(graph), [])
    with pytest.raises(DataError, match=r"batch 0: .* not finite"):
        compare(Network(graph), Network(graph), batches(x))


def test_noise_adds_up_over_batches_like_one_tensor() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, generator=generator), torch.randn(64, generator=generator)
    whole, parts = Noise(), Noise()
    whole.add(x, y)
    for part in range(4):
        parts.add(x[part::4], y[part::4])
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db)
    assert parts.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(x, y, dim=0)), abs=1e-6)
