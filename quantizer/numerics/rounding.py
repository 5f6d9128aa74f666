"""Rounding to integers, one function per mode, in place and without error for any half-way
case. Knows no scales.

All modes but floor differ at the half-way points alone (0.49999997 is no half-way point):

>>> import torch
>>> points = torch.tensor([-2.5, -1.5, -0.5, 0.49999997, 0.5, 1.5, 2.5])
>>> for name, mode in ROUND_MODES.items():
...     print(f"{name:9}", *(f"{value:3.0f}" for value in (mode(points.clone()) + 0).tolist()))
half_even  -2  -2   0   0   0   2   2
half_up    -2  -1   0   0   1   2   3
half_down  -2  -1   0   0   0   1   2
std_round  -3  -2  -1   0   1   2   3
floor      -3  -2  -1   0   0   1   2
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantizer.numerics.registry import register

RoundMode = Callable[[Tensor], Tensor]
ROUND_MODES: dict[str, RoundMode] = {}
NEAREST = frozenset({"half_even", "half_up", "half_down", "std_round"})
"""Modes that round to the nearest integer: one's error is the other's."""


SHARED, WORTH_IT = 1 << 11, 1 << 15
"""Torch shares out more values than the first among threads, in these functions; as many as the
second are worth it.
"""


def _unshared(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that changes `x` in place; a few values by this thread alone.

    To wait for another thread takes a thousand times as long as to round a column, where other
    processes run. What is exported has one operator for any number of values.
    """
    if (
        not torch.compiler.is_compiling()
        and SHARED < x.numel() < WORTH_IT
        and x.is_contiguous()
    ):
        for part in torch.split(x.view(-1), SHARED):
            function(part)
        return x
    return function(x)


@register(ROUND_MODES, "half_even")
def half_even(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, ties to even (IEEE 754, ONNX
    QuantizeLinear), and return it.
    """
    return _unshared(Tensor.round_, x)


@register(ROUND_MODES, "half_up")
def half_up(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, ties toward plus infinity, and return it.

    Doubling is exact below half of the dtype's largest value, so ceil(floor(2x) / 2) sees ties
    as they are, where floor(x + 0.5) rounds the sum first and takes 0.49999997 for a tie.
    """
    return _unshared(Tensor.ceil_, _unshared(Tensor.floor_, x.mul_(2)).mul_(0.5))


@register(ROUND_MODES, "half_down")
def half_down(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, ties toward zero, and return it; needs one
    temporary.
    """
    sign = x.sign()
    return _unshared(Tensor.floor_, _unshared(Tensor.ceil_, x.abs_().mul_(2)).mul_(0.5)).mul_(
        sign
    )


@register(ROUND_MODES, "std_round")
def std_round(x: Tensor) -> Tensor:
    """Round `x` in place, ties away from zero (round() of C), and return it; needs one
    temporary.
    """
    sign = x.sign()
    return half_up(x.abs_()).mul_(sign)


@register(ROUND_MODES, "floor")
def floor(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, toward minus infinity, off by up to a whole
    step, and return it.

    A code times its scale may become the code below: (3 * s) / s is 2.9999998 for some s.
    """
    return _unshared(Tensor.floor_, x)
