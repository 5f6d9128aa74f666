"""`fake_quantize` with positional arguments, so that tests can keep them in one tuple."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantizer.numerics import fake_quantize as module

NAMES = ("scale", "zero_point", "quant_min", "quant_max", "round_mode", "ch_axis")


def fake_quantize(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return what the function of the same name gives."""
    return module.fake_quantize(x, **dict(zip(NAMES, args, strict=False)), **options)


def fake_quantize_plain(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return what the function of the same name gives."""
    return module.fake_quantize_plain(x, **dict(zip(NAMES, args, strict=False)), **options)
