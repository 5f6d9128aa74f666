"""What all layers share: quantizers by role. Nothing here knows the graph or the config."""

from typing import Any, cast

from torch import Tensor, nn

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.graph.parameters import set_parameter
from quantizer.nn.quantizer import TensorQuantizer


class Layer(nn.Module):
    """A module with quantizers: `quantizers[role]`, roles as in `config.roles`.

    Parameters are quantized once, by `quantize_parameters`; activations each time, by `finish`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quantizers = nn.ModuleDict()

    def attach(self, role: str, quantizer: TensorQuantizer) -> None:
        """Put a quantizer in a role; weights and bias take effect at once, on the parameter
        itself.
        """
        self.quantizers[role] = quantizer
        if is_parameter(role):
            name = parameter_name(role)
            set_parameter(self, name, quantizer(self.get_parameter(name).detach()))

    def detach_output(self) -> TensorQuantizer | None:
        """Take the output's quantizer off, if there is one; the layer then gives what it
        computes.
        """
        if "activation" not in self.quantizers:
            return None
        return cast(TensorQuantizer, self.quantizers.pop("activation"))

    def correct_bias(self, correction: Tensor) -> None:
        """Add to the bias, after its quantization; a layer without one gets one."""
        bias = self._parameters.get("bias")
        value = correction.clone() if bias is None else bias.detach() + correction
        self.register_parameter("bias", nn.Parameter(value, requires_grad=False))

    def finish(self, output: Any) -> Any:
        """The output quantized, if it is to be."""
        quantizer = self.quantizers._modules.get("activation")
        return output if quantizer is None else quantizer(output)

    def quantize_input(self, value: Any) -> Any:
        """The layer's own view of its first input."""
        return self.quantizers["input"](value) if "input" in self.quantizers else value

    def quantize_inputs(
        self, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's own view of its inputs, for layers whose config quantizes "input" on its
        own.
        """
        values = list(args) + list(inputs.values())
        for index, value in enumerate(values):
            role = f"input_{index}" if index else "input"
            if role in self.quantizers and isinstance(value, Tensor):
                values[index] = self.quantizers[role](value)
        return tuple(values[: len(args)]), dict(zip(inputs, values[len(args) :], strict=True))
