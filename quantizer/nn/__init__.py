"""The layers of quantized networks, for traced graphs and for the generated code alike."""

import importlib
from typing import TYPE_CHECKING, Any

from quantizer.graph.emit import FUNCTION_LAYERS
from quantizer.nn.function import Constant, DeQuantStub, Function, Input, Parameter, QuantStub
from quantizer.nn.layer import Layer
from quantizer.nn.load import load
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.weighted import (
    GRU,
    LSTM,
    RNN,
    ChannelScale,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    ExpertLinear,
    Linear,
)

if TYPE_CHECKING:
    from quantizer.nn.rare_layers import (
        DpuAvgPool2d,
        DpuHardsigmoid,
        DpuHardswish,
        InputRotation,
        InputScale,
    )

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "ChannelScale",
    "Constant",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "DeQuantStub",
    "DpuAvgPool2d",
    "DpuHardsigmoid",
    "DpuHardswish",
    "Embedding",
    "ExpertLinear",
    "Function",
    "Input",
    "InputRotation",
    "InputScale",
    "Layer",
    "Linear",
    "Parameter",
    "QuantStub",
    "TensorQuantizer",
    "load",
]


_RARE = ("DpuAvgPool2d", "DpuHardsigmoid", "DpuHardswish", "InputRotation", "InputScale")
"""The layers that few networks have. Their module is imported on first use."""


def __getattr__(name: str) -> Any:
    """Return a class on its first use: one of `_RARE`, or `ReLU`, `Add`, …, which is created
    from its row of `FUNCTION_LAYERS`.
    """
    if name in _RARE:
        return getattr(importlib.import_module("quantizer.nn.rare_layers"), name)
    if name not in FUNCTION_LAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = type(name, (Function,), {"target": FUNCTION_LAYERS[name], "__module__": __name__})
    globals()[name] = cls
    return cls
