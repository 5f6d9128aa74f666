"""The base class of all layers: a module with quantizers by role. The order in memory of
images, and of the weights that read them.
"""

import os
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import a_kind
from quantizer.errors import ModelError
from quantizer.graph.ir import Call
from quantizer.graph.tracing.parameters import Module, set_parameter
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.storage.deferred_tensor import DeferredTensor

_IMAGE_DIMS = 4
"""The dimensions of a batch of images: [b, channels, height, width]."""
_PREFER_CHANNELS_FIRST = ("cuda", "mps")
"""Devices whose libraries choose the order, and prefer float32 with the channels first."""


class Layer(nn.Module):
    """A module with quantizers: `quantizers[role]`, roles as in `config.roles`.

    Parameters are quantized once, by `attach`, and activations at every call, by
    `quantize_output`.

    Attributes:
        float_class: the class of a module before it was quantized in place; None for layers of
            a trace.
    """

    float_class: ClassVar[type[nn.Module] | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quantizers = nn.ModuleDict()

    def attach(self, role: str, quantizer: TensorQuantizer) -> None:
        """Put a quantizer in a role. One of a parameter quantizes it at once."""
        self.quantizers[role] = quantizer
        if is_parameter(role):
            name = parameter_name(role)
            value = self.get_parameter(name).detach()
            set_parameter(self, name, quantizer(value))

    def detach_output(self) -> TensorQuantizer | None:
        """Remove the output's quantizer, and return it if there was one."""
        if "activation" not in self.quantizers:
            return None
        return cast(TensorQuantizer, self.quantizers.pop("activation"))

    def correct_bias(self, correction: Tensor) -> None:
        """Add to the bias, after its quantization. A layer without a bias gets one."""
        bias = self._parameters.get("bias")
        if bias is None:
            value = correction.clone()
        else:
            value = bias.detach() + correction
        self.register_parameter("bias", nn.Parameter(value, requires_grad=False))

    def quantize_output(self, output: Any) -> Any:
        """Return the output, quantized if there is a quantizer for it."""
        quantizer = self.quantizers._modules.get("activation")
        return output if quantizer is None else quantizer(output)

    def quantize_input(self, value: Any) -> Any:
        """Return the first input, quantized if there is a quantizer for it."""
        if "input" not in self.quantizers:
            return value
        return self.quantizers["input"](value)

    def quantize_inputs(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> Call:
        """Return the inputs, those quantized that have a quantizer."""
        values = [*args, *inputs.values()]
        for index, value in enumerate(values):
            role = f"input_{index}" if index else "input"
            if role in self.quantizers and isinstance(value, Tensor):
                values[index] = self.quantizers[role](value)
        named = zip(inputs, values[len(args) :], strict=True)
        return tuple(values[: len(args)]), dict(named)


def check_float(model: Any, *, traced: bool = False) -> None:
    """Check that the layers of `model` can be changed in place and that none is quantized.

    Args:
        traced: whether the model is only traced. Then it may have compiled parts.

    Raises:
        ModelError: it is not a module, compiled by torch.jit, or quantized already.
    """
    if not isinstance(model, nn.Module):
        remedy = "give the Python model; quantize it first, then export or compile it"
        if isinstance(model, type):
            remedy = f"give an instance of it: {model.__name__}(…)"
        elif isinstance(model, str | os.PathLike):
            remedy = "load it first, as `from_pretrained` of transformers loads a folder"
        raise ModelError(f"model is {a_kind(model)}, not a torch.nn.Module", help=remedy)
    for path, module in model.named_modules():
        where = path or "the model"
        is_compiled = isinstance(module, torch.jit.ScriptModule)
        has_parameters = next(module.parameters(), None) is not None
        if is_compiled and (not path or (has_parameters and not traced)):
            raise ModelError(
                f"{where} is compiled by torch.jit, so its layers cannot be changed",
                help="quantize the Python model, then trace it",
            )
        if isinstance(module, Layer) and module.float_class is not None:
            raise ModelError(f"{where} is quantized already", help="start from the float model")


def channels_last(x: Tensor) -> Tensor:
    """Return the same images, with the channels of a pixel next to each other in memory."""
    if x.dim() != _IMAGE_DIMS or torch.compiler.is_exporting():
        return x
    if x.device.type in _PREFER_CHANNELS_FIRST:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def weights_last(network: Module) -> Module:
    """Return the network with the channels of its convolutions' weights last, too.

    Otherwise torch reorders them at every call, which takes 3 % of a pass. Those of kernels
    larger than a pixel become copies. Deferred ones stay as they are.
    """
    for layer in network.modules():
        if not isinstance(layer, nn.Conv2d):
            continue
        weight = layer.weight
        if isinstance(weight, DeferredTensor):
            continue
        reordered = channels_last(weight.detach())
        layer.weight = nn.Parameter(reordered, requires_grad=weight.requires_grad)
    return network


def channels_first(value: Any) -> Any:
    """Return the same nested value, in which the pixels of a row of an image, or of a part of
    one, are next to each other.
    """
    if isinstance(value, Tensor):
        if value.dim() != _IMAGE_DIMS:
            return value
        if value.stride(1) >= value.stride(3):
            return value
        # A size of 1 has any stride, so the value may be in order already
        if value.is_contiguous():
            return value
        return value.contiguous()
    if type(value) in (tuple, list):
        return type(value)(map(channels_first, value))
    if type(value) is dict:
        return {key: channels_first(item) for key, item in value.items()}
    return value
