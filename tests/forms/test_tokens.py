"""per_token: one scale for each row of a matrix, for each sample of a convolution; in place and
on a trace.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)
from quantizer.calibration import observing
from quantizer.calibration.solution import quantized_network
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.graph.tracing.trace import trace
from quantizer.plan.resolve import resolve_plan

TOKEN = QuantizationSpec(Dtype.int8, is_dynamic=True, qscheme=QSchemeType.per_token)
CONFIG = Config(QuantizationConfig(input_tensors=TOKEN))

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 3), (4, 5, 6), (2,)),
    "conv1d": (nn.Conv1d(1, 2, 3), (4, 1, 9), (1, 2)),
    "conv2d of one channel": (nn.Conv2d(1, 2, 3), (4, 1, 6, 7), (1, 2, 3)),
    "conv2d": (nn.Conv2d(3, 2, 3), (4, 3, 6, 7), (1, 2, 3)),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 2, 3), (4, 3, 6, 7), (1, 2, 3)),
}
"""A layer, the shape of what it reads, and the axes whose values share a scale."""


def batch(shape: tuple[int, ...]) -> Tensor:
    """Samples of different sizes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x * torch.tensor([1.0, 10.0, 0.1, 3.0]).view(-1, *[1] * (len(shape) - 1))


def in_place(model: nn.Module, _: Tensor) -> Any:
    return ModelQuantizer(CONFIG).quantize_model(model)


def on_a_trace(model: nn.Module, x: Tensor) -> Any:
    graph = trace(model, (x,))
    plan = resolve_plan(
        check_document(Document.of(CONFIG.to_dict(), "Config")).require(), graph, graph
    )
    return quantized_network(
        graph, observing.observed_solution(observing.create_observers(plan))
    )


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("quantize", [in_place, on_a_trace])
def test_values_do_not_depend_on_batch_mates(name: str, quantize: Any) -> None:
    layer, shape, shared = LAYERS[name]
    x = batch(shape)
    scale = x.abs().amax(shared, keepdim=True) / 127
    expected = layer((x / scale).round().clamp(-128, 127) * scale)
    quantized = quantize(nn.Sequential(copy.deepcopy(layer)).eval(), x)
    torch.testing.assert_close(quantized(x), expected)
    assert not torch.allclose(quantized(x), layer(x), rtol=1e-6, atol=0)
    for at in range(4):
        torch.testing.assert_close(quantized(x[at : at + 1]), expected[at : at + 1])
