"""What each layer is in integers: from codes and positions to a wide result, before it is
shifted to the layer's codes.

An operator without a row here, and one whose tensors have no power-of-two scale, runs in float.
Values are exact; only hardswish rounds inside, as the device does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Node
from quantizer.nn.layer import Layer
from quantizer.numerics.integer import (
    HARDSWISH_POSITION,
    INT32,
    LEAKY_SLOPE,
    SIXTH,
    requantize,
    wrap_int32,
)

FINEST_CONSTANT = 24


@dataclass(frozen=True)
class Fixed:
    """A tensor codes * 2^-position: integers held in float64."""

    codes: Tensor
    position: int

    def at(self, position: int) -> Tensor:
        """The codes at another position; exact for a finer one."""
        return self.codes * 2.0 ** (position - self.position)

    def float(self, dtype: torch.dtype | None) -> Tensor:
        """The values in the dtype that the simulation has them in, float32 if it is not
        known.
        """
        return (self.codes * 2.0**-self.position).to(dtype or torch.float32)


@dataclass
class IntegerCall:
    """One layer about to run: `layer` computes in float64 and has codes as its weight and no
    bias.

    `inputs` are the arguments, with `Fixed` for what has codes; `bias` the codes of the bias.
    `overflowed` is set when an accumulator leaves int32, which then wraps as a register does.
    """

    node: Node
    layer: Layer
    inputs: Mapping[str, Any]
    weight_position: int | None = None
    bias: Fixed | None = None
    overflowed: bool = field(default=False, init=False)

    def operand(self, name: str) -> Fixed | None:
        """An argument that has codes, or a constant that is one: a few binary digits."""
        value = self.inputs.get(name, self.node.attrs.get(name))
        return value if isinstance(value, Fixed) else _constant(value)

    def accumulated(self, codes: Tensor, position: int) -> Fixed:
        """A sum in an int32 register."""
        if codes.numel() and float(codes.abs().max()) >= INT32:
            self.overflowed = True
            codes = wrap_int32(codes)
        return Fixed(codes, position)


IntegerRule = Callable[[IntegerCall], Any]
"""From a layer about to run to its wide result, or None where it has no integer form."""


def rule_of(node: Node) -> IntegerRule | None:
    """How the operator runs in integers; None if there is no row for it at all."""
    by_kind: dict[str, IntegerRule] = {"passthrough": _moved, "structural": lambda step: None}
    return _RULES.get(node.target) or _RULES.get(node.op) or by_kind.get(node.row.kind)


def _reads(*names: str) -> Callable[[Callable[..., Fixed | None]], IntegerRule]:
    """The rule is given these operands, and there is no result if one of them has no codes."""

    def wrapped(rule: Callable[..., Fixed | None]) -> IntegerRule:
        def run(step: IntegerCall) -> Fixed | None:
            operands = [step.operand(name) for name in names]
            return None if any(each is None for each in operands) else rule(step, *operands)

        return run

    return wrapped


def _accumulate(step: IntegerCall) -> Fixed | None:
    """Products at position fw + fi, the bias shifted to it; the finer of the two positions
    keeps both exact.
    """
    x = step.inputs.get("input")
    if not isinstance(x, Fixed) or step.weight_position is None:
        return None
    products = step.layer(**{**step.inputs, "input": x.codes})
    position = step.weight_position + x.position
    if step.bias is None:
        return step.accumulated(products, position)
    finest = max(position, step.bias.position)
    bias = step.bias.at(finest).reshape(
        -1, *[1] * (step.layer.get_parameter("weight").ndim - 2)
    )
    return step.accumulated(products * 2.0 ** (finest - position) + bias, finest)


@_reads("input", "other")
def _add(step: IntegerCall, a: Fixed, b: Fixed) -> Fixed | None:
    if step.node.attrs.get("alpha", 1) != 1:
        return None
    finest = max(a.position, b.position)
    sign = -1 if step.node.op == "sub" else 1
    return step.accumulated(a.at(finest) + sign * b.at(finest), finest)


@_reads("input", "other")
def _multiply(step: IntegerCall, a: Fixed, b: Fixed) -> Fixed:
    return step.accumulated(a.codes * b.codes, a.position + b.position)


def _join(step: IntegerCall) -> Fixed | None:
    """Every part shifted to the finest position of all; the shift to the output's position
    rounds each as it would.
    """
    parts = step.inputs.get("tensors", [])
    if not all(isinstance(part, Fixed) for part in parts):
        return None
    finest = max(part.position for part in parts)
    return Fixed(step.layer(tensors=[part.at(finest) for part in parts]), finest)


def _moved(step: IntegerCall) -> Any:
    """Operators that move or select codes, or take the largest; several outputs stay
    several.
    """
    fixed = [value for value in step.inputs.values() if isinstance(value, Fixed)]
    if len(fixed) != 1 or (step.node.op == "pad" and step.node.attrs.get("value")):
        return None
    inputs = {
        key: value.codes if isinstance(value, Fixed) else value
        for key, value in step.inputs.items()
    }
    found, position = step.layer(**inputs), fixed[0].position
    if isinstance(found, Tensor):
        return Fixed(found, position)
    # Indices have no codes
    return [Fixed(part, position) if part.is_floating_point() else part for part in found]


def _pick(step: IntegerCall) -> Any:
    """One of several outputs."""
    several, index = (value for _, value in sorted({**step.inputs, **step.node.attrs}.items()))
    return (
        several[index]
        if isinstance(several, list) and isinstance(several[index], Fixed)
        else None
    )


@_reads("input")
def _relu(step: IntegerCall, x: Fixed) -> Fixed:
    return Fixed(x.codes.clamp(min=0), x.position)


@_reads("input")
def _relu6(step: IntegerCall, x: Fixed) -> Fixed | None:
    attrs = step.node.attrs
    bounds = (
        attrs.get("min_val", attrs.get("min", 0)),
        attrs.get("max_val", attrs.get("max", 6)),
    )
    if step.node.op == "relu6" or bounds == (0, 6):
        return Fixed(x.codes.clamp(0, 6 * 2.0**x.position), x.position)
    return None


@_reads("input")
def _leaky_relu(step: IntegerCall, x: Fixed) -> Fixed | None:
    multiplier, shift = LEAKY_SLOPE
    if step.node.attrs.get("negative_slope") != multiplier / 2**shift:
        return None
    return Fixed(
        torch.where(x.codes < 0, x.codes * multiplier, x.codes * 2.0**shift), x.position + shift
    )


@_reads("input")
def _average(step: IntegerCall, x: Fixed) -> Fixed:
    # The layer's own factor is m / 2^s: in float64 it makes the sum times m at s more fraction
    # bits.
    shift = int(step.node.attrs["shift"])
    return step.accumulated(step.layer(input=x.codes) * 2.0**shift, x.position + shift)


@_reads("input")
def _hardsigmoid(step: IntegerCall, x: Fixed) -> Fixed:
    return _sixths(x)


@_reads("input")
def _hardswish(step: IntegerCall, x: Fixed) -> Fixed:
    wide = _sixths(x)
    gate = requantize(
        wide.codes, wide.position - HARDSWISH_POSITION, -128, 127, round_mode="half_up"
    )
    return Fixed(x.codes * gate, x.position + HARDSWISH_POSITION)


def _sixths(x: Fixed) -> Fixed:
    """relu6(x + 3) / 6."""
    multiplier, shift = SIXTH
    one = 2.0**x.position
    return Fixed((x.codes + 3 * one).clamp(0, 6 * one) * multiplier, x.position + shift)


def _constant(value: Any) -> Fixed | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    for position in range(FINEST_CONSTANT + 1):
        if float(value * 2**position).is_integer():
            return Fixed(torch.tensor(value * 2.0**position, dtype=torch.float64), position)
    return None


_MULTIPLYING = (
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)
_RULES: dict[str, IntegerRule] = {
    **dict.fromkeys(_MULTIPLYING, _accumulate),
    "add": _add,
    "sub": _add,
    "mul": _multiply,
    "cat": _join,
    "stack": _join,
    "getitem": _pick,
    "relu": _relu,
    "relu6": _relu6,
    "hardtanh": _relu6,
    "clamp": _relu6,
    "leaky_relu": _leaky_relu,
    "dpu.avg_pool2d": _average,
    "dpu.hardsigmoid": _hardsigmoid,
    "dpu.hardswish": _hardswish,
}
"""By operator, or by what runs it."""
