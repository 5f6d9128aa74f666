"""What the DPU has engines for, as rows: each limit, the sentence that refuses, and the
document it comes from.

The limits are those of DPUCZDX8G_ISA1_B4096 (ZCU102, ZCU104): channel_parallel 16, bank_depth
2048. Sees no config.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

NAME = "DPUCZDX8G_ISA1_B4096"
OPERATORS = "Vitis AI User Guide (UG1414) 3.5, Currently Supported Operators"
PYTORCH = "Vitis AI User Guide (UG1414) 3.5, Operators Supported by PyTorch"
CHANNELS = 256 * 16
BANK_DEPTH = 2048

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """A window that goes over a feature map: (height, width) each."""

    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    in_channels: int = 1
    out_channels: int = 1

    @property
    def banks(self) -> int:
        """kernel_h * kernel_w * ceil(in_channels / channel_parallel)."""
        return math.prod(self.kernel) * math.ceil(self.in_channels / 16)


@dataclass(frozen=True)
class Limit:
    """`fits` says whether a geometry is inside; `words` is formatted with the geometry as
    `g`.
    """

    engines: tuple[str, ...]
    fits: Callable[[Geometry], bool]
    words: str
    source: str = OPERATORS


def _within(sides: Pair, most: int) -> bool:
    return min(sides) >= 1 and max(sides) <= most


def _pads(most: Callable[[int], int], dilated: bool = True) -> Callable[[Geometry], bool]:
    """Whether each side's padding is at most a function of its kernel, times the dilation."""

    def fits(g: Geometry) -> bool:
        sides = zip(g.padding, g.kernel, g.dilation, strict=True)
        return all(
            pad <= most(kernel) * (dilation if dilated else 1)
            for pad, kernel, dilation in sides
        )

    return fits


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
        lambda g: max(g.dilation) * g.in_channels <= CHANNELS or max(g.dilation) == 1,
        f"dilation times input channels is beyond {CHANNELS} with {{g.dilation}} and "
        f"{{g.in_channels}}",
    ),
    Limit(
        _CONVOLVES,
        lambda g: g.banks <= BANK_DEPTH,
        f"kernel and input channels take {{g.banks}} entries of a bank, which has {BANK_DEPTH}",
    ),
    Limit(
        _TRANSPOSED,
        lambda g: all(
            1 <= math.ceil(k / s) <= 16 for k, s in zip(g.kernel, g.stride, strict=True)
        ),
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
        lambda g: max(g.in_channels, g.out_channels) <= CHANNELS,
        f"it has {{g.in_channels}} input and {{g.out_channels}} output channels, and "
        f"{CHANNELS} are the most",
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
