"""Rounding to integers, one function per mode, in place and exact at every half-way point.

All modes but floor differ at the half-way points alone (0.49999997 is not a half-way point):

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

from quantizer.rows import lookup

RoundMode = Callable[[Tensor], Tensor]
NEAREST = frozenset({"half_even", "half_up", "half_down", "std_round"})
"""The modes that round to the nearest integer. They have the same error."""

# Torch divides more values than this among threads, in these functions
_ONE_THREAD = 1 << 11
# Waiting for other threads pays from this many values on
_WORTH_THREADS = 1 << 15


def rounding_named(name: str) -> RoundMode:
    """Return the function of a mode.

    Raises:
        ValueError: there is no such mode.
    """
    return lookup(ROUND_MODES, name, "rounding mode")


def _by_one_thread(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that changes `x` in place. Few values are left to one thread.

    Where other processes run, waiting for a second thread takes a thousand times as long as
    rounding a column.
    """
    # A trace must not depend on the number of values
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return function(x)
    is_small = _ONE_THREAD < x.numel() < _WORTH_THREADS
    if not is_small or not x.is_contiguous():
        return function(x)
    for part in torch.split(x.view(-1), _ONE_THREAD):
        function(part)
    return x


def round_half_even(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, ties to even (IEEE 754, ONNX
    QuantizeLinear), and return it.
    """
    return _by_one_thread(Tensor.round_, x)


def round_half_up(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, ties toward plus infinity, and return it.

    Doubling is exact below half of the dtype's largest value, so ceil(floor(2x) / 2) is exact
    at ties. floor(x + 0.5) rounds the sum first, and treats 0.49999997 as a tie.
    """
    x.mul_(2)
    _by_one_thread(Tensor.floor_, x)
    x.mul_(0.5)
    return _by_one_thread(Tensor.ceil_, x)


def round_half_down(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, ties toward zero, and return it. This needs
    one temporary.
    """
    sign = x.sign()
    x.abs_().mul_(2)
    _by_one_thread(Tensor.ceil_, x)
    x.mul_(0.5)
    return _by_one_thread(Tensor.floor_, x).mul_(sign)


def round_half_away(x: Tensor) -> Tensor:
    """Round `x` in place, ties away from zero (round() of C), and return it. This needs one
    temporary.
    """
    sign = x.sign()
    return round_half_up(x.abs_()).mul_(sign)


def round_down(x: Tensor) -> Tensor:
    """Round the floating-point tensor `x` in place, toward minus infinity, off by up to a whole
    step, and return it.

    A code times its scale may become the code below: (3 * s) / s is 2.9999998 for some s.
    """
    return _by_one_thread(Tensor.floor_, x)


ROUND_MODES: dict[str, RoundMode] = {
    "half_even": round_half_even,
    "half_up": round_half_up,
    "half_down": round_half_down,
    "std_round": round_half_away,
    "floor": round_down,
}
