"""The registry of range methods: what one looks like and what it is given. The methods are in files of their own."""

from __future__ import annotations

from collections.abc import Callable

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.qparams import Grid
from quantizer.observers.batch import Batch, Range

RangeMethod = Callable[[Batch, QuantizationSpec], Range]
METHODS: dict[str, RangeMethod] = {}


def grid_of(spec: QuantizationSpec) -> Grid:
    """Return the integer grid that `spec` asks for.

    >>> grid_of(QuantizationSpec(bit_width=4))
    Grid(quant_min=-8, quant_max=7, symmetric=True, scale_type='float')
    """
    return Grid(spec.quant_min, spec.quant_max, spec.symmetric, spec.scale_type)
