"""A .pt2 converts to Core ML with its codes and scales. Running that needs a Mac."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import ROOT
from torch import nn

import quantizer
from quantizer.calibration.solution import encode_parameters

ct = pytest.importorskip("coremltools", reason="it converts a .pt2 for Core ML")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:.*")]
X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("activations", ["int8", "uint8"])
def test_codes_and_scales_are_kept(activations: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(8 * 16, 5)).eval()
    preset = str(ROOT / "configs" / "mobile_int8.json")
    result = quantizer.calibrate(model, preset, [X])
    path = tmp_path / "net.pt2"
    result.export("pt2", path, pt2_activations=activations)
    program = torch.export.load(path).run_decompositions({})
    quantized = 0
    for node in program.graph.nodes:
        quantized += "dequantize_per_tensor" in str(node.target)
    converted = ct.convert(
        program,
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS17,
    )
    [function] = converted._mil_program.functions.values()
    operators: Counter[str] = Counter()
    weights: list[Any] = []
    for operation in function.operations:
        operators[operation.op_type] += 1
        if operation.op_type == "constexpr_affine_dequantize":
            weights.append(operation)
    assert (operators["conv"], operators["linear"]) == (1, 1)
    assert operators["quantize"] == operators["dequantize"] == quantized
    calibrated = result._calibrated
    encoded = encode_parameters(calibrated.graph, calibrated.solution)
    expected = []
    for (_, role), tensor in encoded.tensors.items():
        if role == "weights":
            expected.append(tensor)
    assert len(weights) == len(expected) == 2
    for operation, tensor in zip(weights, expected, strict=True):
        codes = np.array(operation.quantized_data.val)
        assert np.array_equal(codes.reshape(tensor.codes.shape), tensor.codes.numpy())
        assert np.allclose(operation.scale.val, tensor.scale.numpy(), rtol=1e-6)
