"""The paired run: what is compared with what."""

from __future__ import annotations

import math

import pytest
import torch
from support.positional import fake_quantize
from torch import Tensor, nn

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.comparison.noise import Noise, beside_mask_constants
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError, ModelError
from quantizer.evaluation.compare import compare
from quantizer.evaluation.scores import Scores
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
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
    quantized = quantized_network(
        graph, Solution({("Doubled::Doubled/add", "input_1"): COARSE})
    )
    assert torch.equal(quantized(x), x + rounded(x))
    found = compare(Network(graph), quantized, batches(x))
    assert [(row.layer, row.role) for row in found.layers] == [
        ("Doubled::Doubled/add", "input_1")
    ]
    assert math.isfinite(found.layers[0].local.sqnr_db)


def test_agreement_counts_samples_over_batches() -> None:
    x = torch.tensor([[0.30, 0.20, 0.0], [1.0, 0.1, 0.0]])
    graph = trace(Doubled(), (x,))
    quantized = quantized_network(graph, Solution({("Doubled::input_0", "input"): COARSE}))
    found = compare(Network(graph), quantized, batches(x, x[1:], x[1:]))
    assert found.metrics()["top1_agreement"] == 1.0
    # Onto multiples of 0.25: (.30, .37) becomes a tie that the first class wins, (.37, .38)
    # stays apart.
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
    assert parts.cosine == pytest.approx(
        float(torch.nn.functional.cosine_similarity(x, y, dim=0)), abs=1e-6
    )


class Mixed(nn.Module):
    """Integers, booleans and a float, in that order."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x + x
        return y.argmax(1), y > 0.1, y


class Indices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + x).argmax(1)


def test_outputs_that_are_no_floats_are_compared_value_by_value() -> None:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)) * 0.2
    graph = trace(Indices(), (x,))
    quantized = quantized_network(graph, Solution({("Indices::input_0", "input"): COARSE}))
    equal = float((rounded(x).argmax(1) == x.argmax(1)).double().mean())
    assert 0.1 < equal < 0.9
    assert compare(Network(graph), quantized, batches(x, x)).metrics() == {
        "equal_outputs": equal
    }
    assert compare(Network(graph), Network(graph), batches(x)).metrics() == {
        "equal_outputs": 1.0
    }


def test_outputs_of_several_kinds_have_figures_of_both() -> None:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)) * 0.2
    graph = trace(Mixed(), (x,))
    quantized = quantized_network(graph, Solution({("Mixed::input_0", "input"): COARSE}))
    found, y = compare(Network(graph), quantized, batches(x)).metrics(), 2 * rounded(x)
    picked = (y.argmax(1) == x.argmax(1)).double().mean()
    above = ((y > 0.1) == (2 * x > 0.1)).double().mean()
    assert float(picked) < float(above)
    assert found["equal_outputs"] == float(picked), (
        "the larger output does not hide the smaller one"
    )
    assert found["sqnr_db"] == pytest.approx(
        Noise(float(x.square().sum()), 0, float((x - y / 2).square().sum())).sqnr_db
    )


class Ratio(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


def test_what_quantization_makes_infinite_is_told_with_its_batch_and_layer() -> None:
    """0.01 is rounded to zero, in the third batch alone."""
    good, bad = torch.full((2, 3), 0.5), torch.full((2, 3), 0.01)
    graph = trace(Ratio(), (good,))
    quantized = quantized_network(graph, Solution({("Ratio::input_0", "input"): COARSE}))
    found = compare(Network(graph), quantized, batches(good, good, bad, good))
    assert found.metrics()["sqnr_db"] == -math.inf
    fault = Scores(found, {}).fault
    assert fault is not None
    assert fault.startswith("batch 2: only the quantized network gives NaN or infinity")
    assert Scores(compare(Network(graph), quantized, batches(good)), {}).fault is None


class Selected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] * 2


def test_outputs_of_which_quantization_changes_the_count_are_refused_with_both_sizes() -> None:
    x = torch.tensor([0.01, 0.5, 0.7])
    graph = trace(Selected(), (x,))
    quantized = quantized_network(graph, Solution({("Selected::input_0", "input"): COARSE}))
    sentence = r"the output: its shape is \[3\] in the float network and \[2\] in the quantized"
    with pytest.raises(ModelError, match=sentence):
        compare(Network(graph), quantized, batches(x))
    assert compare(Network(graph), quantized, batches(x + 1)).outputs[0].whole.count == 3


def test_metrics_that_are_no_numbers_are_a_fault() -> None:
    x = torch.ones(2, 3)
    graph = trace(Doubled(), (x,))
    found = compare(Network(graph), Network(graph), batches(x))
    assert Scores(found, {"top1": {"float": 0.5, "quantized": math.nan}}).fault is not None
    assert Scores(found, {"top1": {"float": math.nan, "quantized": math.nan}}).fault is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mask_constants_are_found_in_any_layout(layout: torch.memory_format) -> None:
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    x[1, 2, 3, 4] = -1e6
    mask = beside_mask_constants(x.to(memory_format=layout))
    assert mask is not None
    assert torch.equal(mask, x > -1)
