"""The floating-point number formats, one row each. Integer grids have no rows: two bounds say all about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.registry import lookup


@dataclass(frozen=True)
class FloatFormat:
    """A format torch can cast to: `storage` is its dtype, `largest` its largest finite value."""

    storage: torch.dtype
    largest: float


FLOAT_FORMATS: dict[str, FloatFormat] = {
    "float32": FloatFormat(torch.float32, torch.finfo(torch.float32).max),
    "float16": FloatFormat(torch.float16, 65504.0),
    "bfloat16": FloatFormat(torch.bfloat16, torch.finfo(torch.bfloat16).max),
    "fp8_e4m3": FloatFormat(torch.float8_e4m3fn, 448.0),
    "fp8_e5m2": FloatFormat(torch.float8_e5m2, 57344.0),
}


def cast_round_trip_(x: Tensor, name: str) -> Tensor:
    """Replace each value of `x` by the nearest one of the format `name`, in place, and return `x`.

    Values beyond the largest finite one become it, infinities too (a plain cast gives infinity in some formats and on
    some devices); NaN stays NaN. The formats are those of IEEE 754 and of "FP8 Formats for Deep Learning" (arXiv
    2209.05433). Raises ValueError for an unknown name.

    >>> cast_round_trip_(torch.tensor([0.3, 1000.0, -1e9]), "fp8_e4m3").tolist()
    [0.3125, 448.0, -448.0]
    """
    row = lookup(FLOAT_FORMATS, name, "floating-point format")
    largest = min(row.largest, torch.finfo(x.dtype).max)
    return x.copy_(x.clamp_(-largest, largest).to(row.storage))
