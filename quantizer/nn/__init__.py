"""The layers of quantized networks, for traced graphs and for the generated code alike."""

from quantizer.graph.describe import FUNCTION_LAYERS
from quantizer.nn.dpu_layers import DpuAvgPool2d as DpuAvgPool2d
from quantizer.nn.dpu_layers import DpuHardsigmoid as DpuHardsigmoid
from quantizer.nn.dpu_layers import DpuHardswish as DpuHardswish
from quantizer.nn.function import Constant as Constant
from quantizer.nn.function import DeQuantStub as DeQuantStub
from quantizer.nn.function import Function as Function
from quantizer.nn.function import Input as Input
from quantizer.nn.function import Parameter as Parameter
from quantizer.nn.function import QuantStub as QuantStub
from quantizer.nn.layer import Layer as Layer
from quantizer.nn.load import load as load
from quantizer.nn.quantizer import TensorQuantizer as TensorQuantizer
from quantizer.nn.rescale import InputRotation as InputRotation
from quantizer.nn.rescale import InputScale as InputScale
from quantizer.nn.weighted import GRU as GRU
from quantizer.nn.weighted import LSTM as LSTM
from quantizer.nn.weighted import RNN as RNN
from quantizer.nn.weighted import ChannelScale as ChannelScale
from quantizer.nn.weighted import Conv1d as Conv1d
from quantizer.nn.weighted import Conv2d as Conv2d
from quantizer.nn.weighted import Conv3d as Conv3d
from quantizer.nn.weighted import ConvTranspose1d as ConvTranspose1d
from quantizer.nn.weighted import ConvTranspose2d as ConvTranspose2d
from quantizer.nn.weighted import ConvTranspose3d as ConvTranspose3d
from quantizer.nn.weighted import Embedding as Embedding
from quantizer.nn.weighted import ExpertLinear as ExpertLinear
from quantizer.nn.weighted import Linear as Linear


def __getattr__(name: str) -> type[Function]:
    """`ReLU`, `Add`, …: one class per row of `FUNCTION_LAYERS`, made on first use."""
    if name not in FUNCTION_LAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = type(name, (Function,), {"target": FUNCTION_LAYERS[name], "__module__": __name__})
    globals()[name] = cls
    return cls
