"""The limits of the DPU's engines, as rows: each limit, the sentence that refuses, and the
document it comes from.

The limits are those of DPUCZDX8G_ISA1_B4096 (ZCU102, ZCU104): channel_parallel 16, bank_depth
2048.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

DPU_NAME = "DPUCZDX8G_ISA1_B4096"
OPERATOR_LIMITS = "Vitis AI User Guide (UG1414) 3.5, Currently Supported Operators"
PYTORCH_OPERATORS = "Vitis AI User Guide (UG1414) 3.5, Operators Supported by PyTorch"
_MOST_CHANNELS = 256 * 16
_BANK_SIZE = 2048

Sides = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Geometry:
    """A window that moves over a feature map."""

    kernel: Sides = (1, 1)
    stride: Sides = (1, 1)
    padding: Sides = (0, 0)
    dilation: Sides = (1, 1)
    in_channels: int = 1
    out_channels: int = 1

    @property
    def banks(self) -> int:
        """Return kernel_h * kernel_w * ceil(in_channels / channel_parallel)."""
        return math.prod(self.kernel) * math.ceil(self.in_channels / 16)


@dataclass(frozen=True)
class Limit:
    """A limit of some engines. `fits` decides whether a geometry is within it. `words` is
    formatted with the geometry as `g`.
    """

    engines: tuple[str, ...]
    fits: Callable[[Geometry], bool]
    words: str


def _within(sides: Sides, most: int) -> bool:
    return min(sides) >= 1 and max(sides) <= most


def _pads(most: Callable[[int], int], *, dilated: bool = True) -> Callable[[Geometry], bool]:
    """Return whether the padding of each side is at most a function of its kernel, times the
    dilation.
    """

    def fits(g: Geometry) -> bool:
        """Return whether no side is padded by more."""
        for pad, kernel, dilation in zip(g.padding, g.kernel, g.dilation, strict=True):
            factor = dilation if dilated else 1
            if pad > most(kernel) * factor:
                return False
        return True

    return fits


def _has_ratio(g: Geometry) -> bool:
    """Return whether kernel over stride, rounded up, is 1 to 16 on each side."""
    sides = zip(g.kernel, g.stride, strict=True)
    ratios = [math.ceil(kernel / stride) for kernel, stride in sides]
    return min(ratios) >= 1 and max(ratios) <= 16


_CONVOLVES = ("conv2d", "depthwise-conv2d")
_TRANSPOSED = ("transposed-conv2d", "depthwise-transposed-conv2d")
_POOLS = ("max-pooling", "average-pooling")

_WIDE = "its padding {g.padding} is wider than its kernel less one"
_BEYOND = "its padding is {g.padding}, and sides are at most 15 and less than"

LIMITS: tuple[Limit, ...] = (
    Limit(
        ("conv2d",),
        lambda g: _within(g.kernel, 16),
        "its kernel is {g.kernel}, and sides are 1 to 16",
    ),
    Limit(
        ("conv2d",),
        lambda g: _within(g.stride, 8),
        "its stride is {g.stride}, and sides are 1 to 8",
    ),
    Limit(("conv2d",), _pads(lambda k: k - 1), _WIDE),
    Limit(
        ("depthwise-conv2d",),
        lambda g: _within(g.kernel, 256),
        "its kernel is {g.kernel}, and sides are 1 to 256",
    ),
    Limit(
        ("depthwise-conv2d",),
        lambda g: _within(g.stride, 256),
        "its stride is {g.stride}, and sides are 1 to 256",
    ),
    Limit(("depthwise-conv2d",), _pads(lambda k: min(k - 1, 15)), f"{_BEYOND} the kernel"),
    Limit(
        _CONVOLVES,
        lambda g: max(g.dilation) * g.in_channels <= _MOST_CHANNELS or max(g.dilation) == 1,
        f"dilation times input channels is beyond {_MOST_CHANNELS} with {{g.dilation}} and "
        f"{{g.in_channels}}",
    ),
    Limit(
        _CONVOLVES,
        lambda g: g.banks <= _BANK_SIZE,
        f"kernel and input channels take {{g.banks}} entries of a bank, which has {_BANK_SIZE}",
    ),
    Limit(
        _TRANSPOSED,
        _has_ratio,
        "kernel over stride is {g.kernel} over {g.stride}, and the ratio is 1 to 16",
    ),
    Limit(_TRANSPOSED, _pads(lambda k: k - 1, dilated=False), _WIDE),
    Limit(
        _POOLS,
        lambda g: _within(g.kernel, 256),
        "its window is {g.kernel}, and sides are 1 to 256",
    ),
    Limit(
        _POOLS,
        lambda g: _within(g.stride, 256),
        "its stride is {g.stride}, and sides are 1 to 256",
    ),
    Limit(_POOLS, _pads(lambda k: min(k - 1, 15)), f"{_BEYOND} the window"),
    Limit(
        (*_CONVOLVES, *_TRANSPOSED, *_POOLS, "eltwise"),
        lambda g: max(g.in_channels, g.out_channels) <= _MOST_CHANNELS,
        f"it has {{g.in_channels}} input and {{g.out_channels}} output channels, and "
        f"{_MOST_CHANNELS} are the most",
    ),
)

FUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (*_CONVOLVES, *_TRANSPOSED), ("relu", "relu6", "leaky_relu", "hardswish", "hardsigmoid")
    ),
    "eltwise": ("relu",),
    **dict.fromkeys(_POOLS, ("relu", "relu6")),
}
"""The activations that an engine applies to what it computes."""
