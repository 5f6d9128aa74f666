"""The layers of quantized networks, for traced graphs and for the generated code alike."""

from quantizer.graph.emit import FUNCTION_LAYERS
from quantizer.nn.dpu_layers import DpuAvgPool2d, DpuHardsigmoid, DpuHardswish
from quantizer.nn.function import Constant, DeQuantStub, Function, Input, Parameter, QuantStub
from quantizer.nn.layer import Layer
from quantizer.nn.load import load
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.rescale import InputRotation, InputScale
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


def __getattr__(name: str) -> type[Function]:
    """Return `ReLU`, `Add`, …: one class per row of `FUNCTION_LAYERS`, created on first use."""
    if name not in FUNCTION_LAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = type(name, (Function,), {"target": FUNCTION_LAYERS[name], "__module__": __name__})
    globals()[name] = cls
    return cls
