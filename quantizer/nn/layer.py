"""The base class of all layers: a module with quantizers by role."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import a_kind
from quantizer.errors import ModelError
from quantizer.graph.ir import Call
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.nn.quantizer import TensorQuantizer


class Layer(nn.Module):
    """A module with quantizers: `quantizers[role]`, roles as in `config.roles`.

    Parameters are quantized once, by `attach`, and activations at every call, by `finish`.

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

    def finish(self, output: Any) -> Any:
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
