"""A layer that is one torch function, with its constants fixed and, for normalizations, its own
parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quantizer.graph.ops import find_op
from quantizer.graph.targets import packet, resolve, takes_self
from quantizer.nn.image_layout import channels_first
from quantizer.nn.layer import Layer


def _view(input: Tensor, size: Sequence[int]) -> Tensor:  # noqa: A002 - as torch's schemas name it, but for "self"
    """A view refuses orders of memory that it was not traced with, and where it does not it is
    this.
    """
    return input.reshape(size)


def topk(
    input: Tensor,  # noqa: A002
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> tuple[Tensor, Tensor]:
    """Of equal values the first come first, as ONNX defines TopK; torch leaves it open, and
    codes are often equal.
    """
    values, indices = input.sort(dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


_TOPK = "aten.topk.default"
_CALLS: dict[str, Callable[..., Any]] = {"aten.view.default": _view, _TOPK: topk}
"""What runs instead of torch's operator, with the same arguments."""


class Function(Layer):
    """`Function("aten.mean.default")`, or a subclass that fixes the target: `Mean(dim=[2, 3])`.

    `params` gives the shapes of parameters the function reads (a normalization's weight);
    `inplace` lets it overwrite its input.
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
        twin = "_.".join(self._target.rsplit(".", 1))  # aten.relu_.default
        self._bind(_CALLS.get(self._target) or resolve(twin if inplace else self._target))
        self._any_layout = find_op(packet(self._target)).any_layout
        self._params = tuple(params or ())
        for name, shape in (params or {}).items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(tuple(shape)), requires_grad=False)
            )

    def _bind(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._renames_self = takes_self(call)
        self._positional = self._target not in _CALLS and not hasattr(call, "_schema")

    def leave_ties_open(self) -> None:
        """Run torch's `topk`, if that is the function: for a translation to what picks the
        first of equal values.
        """
        if self._target == _TOPK:
            self._bind(resolve(_TOPK))

    def forward(self, *args: Any, **inputs: Any) -> Any:
        if not self._any_layout:
            args, inputs = channels_first(args), channels_first(inputs)
        if self.quantizers:
            args, inputs = self.quantize_inputs(args, inputs)
        if self._positional:
            named = sorted({**self._constants, **inputs}.items())
            return self.finish(self._call(*args, *(value for _, value in named)))
        values = {**self._constants, **inputs, **dict(zip(("input",), args, strict=False))}
        values |= {name: getattr(self, name) for name in self._params}
        if self._renames_self:
            values["self"] = values.pop("input")
        return self.finish(self._call(**values))

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self._constants.items())


class Input(Layer):
    """Where one of the network's inputs enters."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - the seed's spelling of the call
        return self.quantize_input(input)


class QuantStub(Input):
    """Where the quantized part of a model that marks it begins."""


class DeQuantStub(Layer):
    """Where the quantized part ends."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch.ao.quantization names it
        return input


class Constant(Layer):
    """A tensor that an expression reads and that nobody trained: a mask, an index, a buffer;
    never quantized.
    """

    weight: Tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(tuple(shape), dtype=dtype), requires_grad=False)
        )

    def forward(self) -> Tensor:
        return self.weight


class Parameter(Constant):
    """A trained tensor that an expression reads (`x + self.shift`)."""
