"""The registry of range methods: what one looks like and what it is given. The methods are in files of their own."""

from __future__ import annotations

from collections.abc import Callable

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import Kernel
from quantizer.numerics.fake_cast import float_kernel
from quantizer.numerics.fake_quantize import integer_kernel
from quantizer.numerics.qparams import CodeRange, FloatRange, IntegerRange
from quantizer.observers.batch import Batch, Range

RangeMethod = Callable[[Batch, QuantizationSpec], Range]
METHODS: dict[str, RangeMethod] = {}
INTEGER_ONLY = frozenset({"entropy", "diffs"})
"""Methods that are about integer codes: levels to merge bins into, positions of a binary point."""


def code_range_of(spec: QuantizationSpec) -> CodeRange:
    """Return the codes that `spec` scales to. Raises ValueError if there are none, as for formats without a scale.

    >>> code_range_of(QuantizationSpec(bit_width=4))
    IntegerRange(quant_min=-8, quant_max=7, symmetric=True, scale_type='float', finest_position=None)
    >>> code_range_of(QuantizationSpec(dtype="fp4", scale_type="e8m0"))
    FloatRange(dtype='fp4', scale_type='e8m0', scale_mode='floor', symmetric=True)
    """
    if not spec.is_scaled:
        raise ValueError(f'Only scaled formats have a range, and dtype is "{spec.dtype}".')
    if spec.dtype == "int":
        return IntegerRange(spec.quant_min, spec.quant_max, spec.symmetric, spec.scale_type, spec.finest_position)
    return FloatRange(spec.dtype, spec.scale_type, spec.scale_mode, spec.symmetric)


def kernel_of(spec: QuantizationSpec) -> Kernel:
    """Return what makes codes of `spec` of x / scale.

    >>> import torch
    >>> kernel_of(QuantizationSpec(bit_width=4))(torch.tensor([-9.0, 0.6]), 0).tolist()
    [-8.0, 1.0]
    """
    if spec.dtype == "int":
        return integer_kernel(spec.quant_min, spec.quant_max, spec.round_mode)
    return float_kernel(spec.dtype)


def axis_of(spec: QuantizationSpec) -> int | None:
    """Return the axis that scales go with, None for one scale in all. Raises ValueError where the axis is missing."""
    if spec.qscheme == "per_tensor":
        return None
    if spec.ch_axis is None:
        raise ValueError(f"{spec.qscheme} needs ch_axis, the axis it goes along.")
    return spec.ch_axis
