"""Computes each layer in integers: from codes and positions to a wide result, which is then
shifted to the layer's codes.

Results are exact; only hardswish rounds inside, as the device does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Node
from quantizer.nn.layer import Layer
from quantizer.numerics.integer import (
    HARDSWISH_POSITION,
    INT32_BOUND,
    LEAKY_SLOPE,
    SIXTH,
    requantize,
    wrap_int32,
)

LayerArguments = Mapping[str, Any]
"""The arguments of a layer by name."""
_FINEST_CONSTANT = 24
"""The largest position of a constant."""


@dataclass(frozen=True)
class FixedPoint:
    """A tensor of value codes * 2^-position, with integer codes in float64."""

    codes: Tensor
    position: int

    @classmethod
    def of(cls, values: Tensor, position: int) -> FixedPoint:
        """Return values that are multiples of 2^-position."""
        return cls(values.double() * 2.0**position, position)

    def at(self, position: int) -> Tensor:
        """Return the codes at another position; exact for a finer one."""
        return self.codes * 2.0 ** (position - self.position)

    def float(self, dtype: torch.dtype | None) -> Tensor:
        """Return the values in a dtype; in float32 if it is None."""
        values = self.codes * 2.0**-self.position
        return values.to(dtype or torch.float32)


@dataclass
class IntegerCall:
    """One layer that is about to run.

    Attributes:
        node: of the layer.
        layer: computes in float64 with the codes of the weight, and without bias.
        inputs: the arguments; those with codes are `FixedPoint`.
        weight_position: of the codes of the weight.
        bias: its codes.
        overflowed: set when an accumulator exceeds int32, which then wraps around.
    """

    node: Node
    layer: Layer
    inputs: LayerArguments
    weight_position: int | None = None
    bias: FixedPoint | None = None
    overflowed: bool = field(default=False, init=False)

    def operand(self, name: str) -> FixedPoint | None:
        """Return an argument or constant as codes; None if it has none."""
        value = self.inputs.get(name, self.node.attrs.get(name))
        if isinstance(value, FixedPoint):
            return value
        return _constant(value)

    def accumulated(self, codes: Tensor, position: int) -> FixedPoint:
        """Return a sum as an int32 register holds it."""
        largest = codes.abs().max() if codes.numel() else 0
        if largest >= INT32_BOUND:
            self.overflowed = True
            codes = wrap_int32(codes)
        return FixedPoint(codes, position)


_Rule = Callable[..., FixedPoint | None]
IntegerRule = Callable[[IntegerCall], Any]
"""Returns the wide result of a layer; None if its inputs have no codes."""


def integer_rule(node: Node) -> IntegerRule | None:
    """Return how an operator runs in integers; None if it has no integer form."""
    for name in (node.target, node.op):
        if name in _RULES:
            return _RULES[name]
    if node.row.kind == "passthrough":
        return _move
    if node.row.kind == "structural":
        return lambda step: None
    return None


def _reads(*names: str) -> Callable[[_Rule], IntegerRule]:
    """Call a rule with these operands, if all of them have codes."""

    def decorate(rule: _Rule) -> IntegerRule:
        def run(step: IntegerCall) -> FixedPoint | None:
            operands = [step.operand(name) for name in names]
            if None in operands:
                return None
            return rule(step, *operands)

        return run

    return decorate


def _accumulate(step: IntegerCall) -> FixedPoint | None:
    """Return products at position fw + fi plus the bias, at the finer of their positions."""
    x = step.inputs.get("input")
    if not isinstance(x, FixedPoint) or step.weight_position is None:
        return None
    inputs = {**step.inputs, "input": x.codes}
    products = step.layer(**inputs)
    position = step.weight_position + x.position
    if step.bias is None:
        return step.accumulated(products, position)
    finest = max(position, step.bias.position)
    spatial = step.layer.get_parameter("weight").ndim - 2
    shape = (-1, *[1] * spatial)
    bias = step.bias.at(finest).reshape(shape)
    products = products * 2.0 ** (finest - position)
    return step.accumulated(products + bias, finest)


@_reads("input", "other")
def _add(step: IntegerCall, a: FixedPoint, b: FixedPoint) -> FixedPoint | None:
    if step.node.attrs.get("alpha", 1) != 1:
        return None
    finest = max(a.position, b.position)
    codes = b.at(finest)
    if step.node.op == "sub":
        codes = -codes
    return step.accumulated(a.at(finest) + codes, finest)


@_reads("input", "other")
def _multiply(step: IntegerCall, a: FixedPoint, b: FixedPoint) -> FixedPoint:
    codes = a.codes * b.codes
    return step.accumulated(codes, a.position + b.position)


def _join(step: IntegerCall) -> FixedPoint | None:
    """Return the joined parts at the finest of their positions.

    The later shift to the output's position rounds each part as its own shift would.
    """
    parts = step.inputs.get("tensors", [])
    if not all(isinstance(part, FixedPoint) for part in parts):
        return None
    finest = max(part.position for part in parts)
    codes = [part.at(finest) for part in parts]
    return FixedPoint(step.layer(tensors=codes), finest)


def _move(step: IntegerCall) -> Any:
    """Return the result, or results, of an operator that moves or selects codes, such as a
    maximum.
    """
    if step.node.op == "pad" and step.node.attrs.get("value"):
        return None
    inputs = dict(step.inputs)
    positions = []
    for name, value in inputs.items():
        if isinstance(value, FixedPoint):
            inputs[name] = value.codes
            positions.append(value.position)
    if len(positions) != 1:
        return None
    result = step.layer(**inputs)
    if isinstance(result, Tensor):
        return FixedPoint(result, positions[0])
    results = []
    for part in result:
        if part.is_floating_point():
            part = FixedPoint(part, positions[0])
        results.append(part)
    return results


def _pick(step: IntegerCall) -> Any:
    """Return one of several outputs."""
    call = {**step.inputs, **step.node.attrs}
    # The names are "index" and "input", or "indices" and "input": sorted, the sequence is last.
    sequence, index = (call[name] for name in sorted(call))
    if not isinstance(sequence, list):
        return None
    value = sequence[index]
    return value if isinstance(value, FixedPoint) else None


@_reads("input")
def _relu(step: IntegerCall, x: FixedPoint) -> FixedPoint:
    return FixedPoint(x.codes.clamp(min=0), x.position)


@_reads("input")
def _relu6(step: IntegerCall, x: FixedPoint) -> FixedPoint | None:
    attrs = step.node.attrs
    low = attrs.get("min_val", attrs.get("min", 0))
    high = attrs.get("max_val", attrs.get("max", 6))
    if step.node.op != "relu6" and (low, high) != (0, 6):
        return None
    six = 6 * 2.0**x.position
    return FixedPoint(x.codes.clamp(0, six), x.position)


@_reads("input")
def _leaky_relu(step: IntegerCall, x: FixedPoint) -> FixedPoint | None:
    multiplier, shift = LEAKY_SLOPE
    if step.node.attrs.get("negative_slope") != multiplier / 2**shift:
        return None
    positive = x.codes * 2.0**shift
    negative = x.codes * multiplier
    codes = torch.where(x.codes < 0, negative, positive)
    return FixedPoint(codes, x.position + shift)


@_reads("input")
def _average(step: IntegerCall, x: FixedPoint) -> FixedPoint:
    # The layer multiplies the sum by m / 2^s, which is exact in float64.
    shift = int(step.node.attrs["shift"])
    codes = step.layer(input=x.codes) * 2.0**shift
    return step.accumulated(codes, x.position + shift)


@_reads("input")
def _hardswish(step: IntegerCall, x: FixedPoint) -> FixedPoint:
    wide = _relu6_sixth(x)
    shift = wide.position - HARDSWISH_POSITION
    gate = requantize(wide.codes, shift, -128, 127, round_mode="half_up")
    return FixedPoint(x.codes * gate, x.position + HARDSWISH_POSITION)


@_reads("input")
def _hardsigmoid(step: IntegerCall, x: FixedPoint) -> FixedPoint:
    return _relu6_sixth(x)


def _relu6_sixth(x: FixedPoint) -> FixedPoint:
    """Return relu6(x + 3) / 6."""
    multiplier, shift = SIXTH
    one = 2.0**x.position
    codes = x.codes + 3 * one
    codes = codes.clamp(0, 6 * one)
    return FixedPoint(codes * multiplier, x.position + shift)


def _constant(value: Any) -> FixedPoint | None:
    """Return the codes of a number with few binary digits; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    for position in range(_FINEST_CONSTANT + 1):
        if float(value * 2**position).is_integer():
            exact = torch.tensor(value, dtype=torch.float64)
            return FixedPoint.of(exact, position)
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
"""Rules by operator, or by target."""
