"""A layer that is one torch function, with its constants and, for normalizations, its
parameters.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quantizer.graph.ops import find_op
from quantizer.graph.targets import packet, resolve_target, takes_self
from quantizer.nn.layer import Layer, channels_first


def _view(input: Tensor, size: Sequence[int]) -> Tensor:  # noqa: A002 - as torch's schemas name it, except "self"
    """Return a view if possible, otherwise a copy. `Tensor.view` would fail if the input is not
    laid out in memory as it was in the trace.
    """
    return input.reshape(size)


def topk(
    input: Tensor,  # noqa: A002
    k: int,
    dim: int = -1,
    largest: bool = True,
    *,
    sorted: bool = True,  # noqa: A002
) -> tuple[Tensor, Tensor]:
    """Return the `k` largest values. Of equal values the first ones are returned, as in ONNX.

    `torch.topk` may return any of equal values, and quantized values are often equal. The
    result has the names and the memory layout of torch's, as users' code may read them. It is
    always sorted, so `sorted` is only there to be accepted.
    """
    values, indices = input.sort(dim=dim, descending=largest, stable=True)
    first = (values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous())
    return torch.return_types.topk(first)


_TOPK = "aten.topk.default"
_CALLS: dict[str, Callable[..., Any]] = {"aten.view.default": _view, _TOPK: topk}
"""The functions that run instead of torch's operators, with the same arguments."""


class Function(Layer):
    """A layer that calls one torch function.

    It is created by target, `Function("aten.mean.default", dim=[2, 3])`, or as an instance of a
    subclass with a fixed target, `Mean(dim=[2, 3])`.

    Args:
        target: torch's name of the function.
        params: the shapes of parameters that the function reads, such as a normalization's
            weight.
        inplace: let the function overwrite its input.
        constants: arguments that are the same in all calls.
    """

    target: ClassVar[str] = ""

    def __init__(
        self,
        target: str = "",
        *,
        params: Mapping[str, Sequence[int]] | None = None,
        inplace: bool = False,
        **constants: Any,
    ) -> None:
        super().__init__()
        self._target = target or self.target
        self._constants = constants
        if self._target in _CALLS:
            self._bind(_CALLS[self._target])
        elif inplace:
            # aten.relu.default becomes aten.relu_.default
            self._bind(resolve_target("_.".join(self._target.rsplit(".", 1))))
        else:
            self._bind(resolve_target(self._target))
        # Whether the operator takes images with channels last as they are
        self._any_layout = find_op(packet(self._target)).any_layout
        self._params = tuple(params or ())
        for name, shape in (params or {}).items():
            value = nn.Parameter(torch.empty(tuple(shape)), requires_grad=False)
            self.register_parameter(name, value)

    def _bind(self, call: Callable[..., Any]) -> None:
        """Set the function to call, and how it takes its arguments.

        Python's own operators have no schema. They take their arguments by position, and the
        graph calls these a, b and c.
        """
        self._call = call
        self._renames_self = takes_self(call)
        self._is_positional = self._target not in _CALLS and not hasattr(call, "_schema")

    def leave_ties_open(self) -> None:
        """Call torch's own operator if the function is `topk`.

        Exported to ONNX, it returns the first of equal values anyway.
        """
        if self._target == _TOPK:
            self._bind(resolve_target(_TOPK))

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Call the operator with its constants and parameters, between quantizers."""
        if not self._any_layout:
            args = channels_first(args)
            inputs = channels_first(inputs)
        if self.quantizers:
            args, inputs = self.quantize_inputs(args, inputs)
        values = {**self._constants, **inputs}
        if self._is_positional:
            sorted_values = [values[name] for name in sorted(values)]
            return self.quantize_output(self._call(*args, *sorted_values))
        if args:
            values["input"] = args[0]
        for name in self._params:
            values[name] = getattr(self, name)
        if self._renames_self:
            values["self"] = values.pop("input")
        return self.quantize_output(self._call(**values))

    def extra_repr(self) -> str:
        """Return the constants, which `print` shows."""
        return ", ".join(f"{key}={value!r}" for key, value in self._constants.items())


class Input(Layer):
    """A layer that returns one of the network's inputs, quantized."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - the seed's spelling of the call
        """Return the quantized input."""
        return self.quantize_input(input)


class QuantStub(Input):
    """A marker of the place where the quantized part of a model begins."""


class DeQuantStub(Layer):
    """A marker of the place where the quantized part of a model ends."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch.ao.quantization names it
        """Return the input."""
        return input


class Constant(Layer):
    """An untrained tensor in an expression, such as a mask, an index or a buffer. It is never
    quantized.
    """

    weight: Tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        value = torch.empty(tuple(shape), dtype=dtype)
        self.register_parameter("weight", nn.Parameter(value, requires_grad=False))

    def forward(self) -> Tensor:
        """Return the tensor."""
        return self.weight


class Parameter(Constant):
    """A trained tensor in an expression, such as `self.shift` in `x + self.shift`."""


def leave_ties_open(layers: Iterable[nn.Module]) -> None:
    """Let each `topk` among the layers be torch's own operator, for compilers."""
    for layer in layers:
        if isinstance(layer, Function):
            layer.leave_ties_open()
