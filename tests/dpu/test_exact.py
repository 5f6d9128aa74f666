"""The DPU's integers are the simulation code for code: convolutions, elementwise, pooling,
concat, every rounding.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from support.dpu_networks import (
    NETWORKS,
    Applied,
    batches,
    calibrated,
    example,
    planned,
    solved,
)
from torch import nn

from quantizer.calibration.solution import Solution, quantized_network
from quantizer.errors import DataError, UsageError
from quantizer.evaluation.exact import LayerCodes, compare_exact
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.rounding import ROUND_MODES


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_code_is_that_of_the_simulation(name: str) -> None:
    graph, solution = solved(name)
    found = compare_exact(graph, solution, batches(0, 1, 2))
    assert (found.equal, found.floats, found.overflows) == (1.0, {}, {})
    assert [row.layer for row in found.layers] == [
        node.name for node in graph.nodes if has_codes(node.name, solution)
    ]
    assert all(row.codes >= 3 * 8 * 5 for row in found.layers)


def has_codes(name: str, solution: Solution) -> bool:
    return (name, "activation") in solution.tensors or (name, "input") in solution.tensors


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("name", ["conv2d", "average", "add"])
def test_every_rounding_is_that_of_the_simulation(name: str, mode: str) -> None:
    graph, solution = solved(name)
    assert compare_exact(graph, rounded(solution, mode), batches(0, 1)).equal == 1.0


def rounded(solution: Solution, mode: str) -> Solution:
    tensors = {
        key: respecified(tensor, round_mode=mode) for key, tensor in solution.tensors.items()
    }
    return dataclasses.replace(solution, tensors=tensors)


def respecified(
    tensor: QuantizedTensor, scale: torch.Tensor | None = None, **fields: Any
) -> QuantizedTensor:
    spec = dataclasses.replace(tensor.spec, **fields)
    return dataclasses.replace(
        tensor, spec=spec, scale=tensor.scale if scale is None else scale
    )


def test_the_integers_are_those_of_exact_arithmetic() -> None:
    """One output value by Python's fractions alone: codes, bias shift, shift_cut, half_up, the
    clip.
    """
    torch.manual_seed(0)
    graph, solution = calibrated(planned(nn.Conv2d(4, 3, 1)))
    layer = quantized_network(graph, solution)
    name = graph.nodes[1].name
    fi, fw, fb, fo = (
        solution.tensors[key].position
        for key in (
            (graph.nodes[0].name, "input"),
            (name, "weights"),
            (name, "bias"),
            (name, "activation"),
        )
    )
    assert fi is not None and fw is not None and fb is not None and fo is not None
    x = [round(float(v) * 2**fi) for v in example()[0, :, 0, 0]]
    weight = [
        round(float(v) * 2**fw) for v in layer.layers[name].get_parameter("weight")[1, :, 0, 0]
    ]
    bias = round(float(layer.layers[name].get_parameter("bias")[1]) * 2**fb)
    total = sum(a * b for a, b in zip(x, weight, strict=True)) + Fraction(bias) * Fraction(
        2
    ) ** (fw + fi - fb)
    expected = min(
        127, int((total / Fraction(2) ** (fw + fi - fo) + Fraction(1, 2)).__floor__())
    )
    with torch.no_grad():
        assert float(layer(example())[0, 1, 0, 0]) * 2**fo == expected
    assert compare_exact(graph, solution, batches(0)).equal == 1.0


def test_what_has_no_integer_form_runs_in_float_and_is_listed() -> None:
    graph, solution = calibrated(planned(Applied(lambda y, x: torch.sigmoid(y) + y)))
    found = compare_exact(graph, solution, batches(0))
    assert [(name.rpartition("/")[2], why) for name, why in found.floats.items()] == [
        ("sigmoid", "sigmoid has no integer form here")
    ]
    assert found.equal == 1.0


def test_indices_are_not_codes() -> None:
    graph, solution = calibrated(
        planned(Applied(lambda y, x: y.scatter(1, y.topk(2, 1).indices, 0.0) + y))
    )
    assert compare_exact(graph, solution, batches(0)).equal == 1.0


def test_a_layer_without_a_power_of_two_grid_runs_in_float() -> None:
    graph, solution = solved("conv2d")
    tensors = {
        key: respecified(tensor, tensor.scale * 1.01, scale_type="float")
        if key[1] == "weights"
        else tensor
        for key, tensor in solution.tensors.items()
    }
    found = compare_exact(graph, dataclasses.replace(solution, tensors=tensors), batches(0))
    assert list(found.floats.values()) == ["its parameters have no single power-of-two scale"]


def test_an_accumulator_that_leaves_int32_wraps_and_is_told() -> None:
    graph, solution = solved("conv2d")
    conv = graph.nodes[1].name
    wide = {
        key: respecified(tensor, torch.tensor(2.0**-20), bit_width=24)
        if key[1] in ("weights", "input")
        else tensor
        for key, tensor in solution.tensors.items()
    }
    found = compare_exact(graph, dataclasses.replace(solution, tensors=wide), batches(0, 1))
    assert found.overflows == {conv: 0}
    assert found.equal < 1


def test_codes_that_differ_are_counted_with_their_distance() -> None:
    row = LayerCodes("a", "activation", 4)
    row.add(torch.tensor([1.0, 5.0, -3.0]), torch.tensor([1.0, 2.0, -2.0]))
    row.add(torch.tensor([0.0]), torch.tensor([0.0]))
    assert (row.codes, row.differing, row.most_steps) == (4, 2, 3)


def test_no_batches_are_an_error() -> None:
    with pytest.raises(DataError, match="no batches"):
        compare_exact(*solved("conv2d"), [])


def test_a_batch_that_does_not_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"^batch 1: .*: expected \["):
        compare_exact(*solved("conv2d"), [*batches(0), *batches(1, dtype=torch.float64)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    plan = planned(nn.Conv2d(4, 8, 3).to(dtype), example().to(dtype))
    given = calibrated(plan, dtype)
    with pytest.raises(
        UsageError, match=f"computes in {str(dtype).removeprefix('torch.')}"
    ) as refused:
        compare_exact(*given, batches(0, dtype=dtype))
    assert refused.value.help is not None
    assert "float32 model" in refused.value.help


def test_a_double_model_is_exact_where_layers_run_in_float_too() -> None:
    module = Applied(lambda y, x: torch.sigmoid(y.chunk(2, 1)[0]) + 1.5).double()
    graph, solution = calibrated(planned(module, example().double()), torch.float64)
    found = compare_exact(graph, solution, batches(0, 1, dtype=torch.float64))
    assert (found.equal, len(found.floats)) == (1.0, 1)
