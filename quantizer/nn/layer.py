"""The base class of all layers: a module with quantizers by role."""

from typing import Any, cast

from torch import Tensor, nn

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.graph.ir import Call
from quantizer.graph.parameters import set_parameter
from quantizer.nn.quantizer import TensorQuantizer


class Layer(nn.Module):
    """A module with quantizers: `quantizers[role]`, roles as in `config.roles`.

    Parameters are quantized once, by `attach`, and activations at every call, by `finish`.
    """

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
