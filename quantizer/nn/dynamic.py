"""Quantization with a range found each time: of the tensor at hand, or of each of its rows.
Knows no modules.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import BLOCK, fill
from quantizer.numerics.codes import work_dtype_of
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.qparams import CodeRange, IntegerRange, QParams, qparams_from_range
from quantizer.observers import NegativeValuesError, ObservationError, code_range_of, kernel_of
from quantizer.observers.observed_batch import Range, as_rows, extremes

# Values whose ranges are found before they are quantized: the blocks share the work on scales
ROUND = 4 * BLOCK


def dynamic_qparams(x: Tensor, spec: QuantizationSpec) -> QParams:
    """Return scale and zero point for the least and greatest values of `x`, of `scale_shape`.

    Raises:
        ObservationError: there is NaN, infinity or a negative value without a code; not in a
            program that torch traces, which has no errors of its own.
    """
    rows = as_rows(x, *spec.cut)
    traced = torch.compiler.is_compiling()  # true of exports as well
    found = (rows.amin(1), rows.amax(1)) if traced else extremes(rows)
    code_range = code_range_of(spec)
    if not traced:
        _check(_broken(found), len(rows), float(found[0].min()), code_range)
    qparams = qparams_from_range(*found, code_range)
    shape = scale_shape(tuple(x.shape), *spec.cut)
    return QParams(qparams.scale.view(shape), qparams.zero_point.view(shape))


def quantize_rows(rows: Tensor, spec: QuantizationSpec, *, inplace: bool) -> Tensor:
    """Return each of `rows` quantized with the scale of its own range; a block is quantized
    while it is in the cache.

    The values are those that `dynamic_qparams` gives, where scales do not depend on each other.

    Raises:
        ObservationError: as there, maybe after writing.
    """
    code_range, kernel = code_range_of(spec), kernel_of(spec)
    out = rows if inplace else torch.empty_like(rows)
    work = work_dtype_of(spec, rows.dtype)
    height = max(1, ROUND // max(1, rows.shape[1]))
    broken, least = 0, 0.0
    for start in range(0, len(rows), height):
        here = slice(start, start + height)
        wide = rows[here].to(work)
        found = extremes(wide)
        low, high = float(found[0].min()), float(found[1].max())
        broken += 0 if math.isfinite(low) and math.isfinite(high) else _broken(found)
        least = min(least, low)
        qparams = qparams_from_range(*found, code_range)
        target = wide if inplace or out.dtype != work else out[here]
        fill(target, wide, qparams.scale, qparams.zero_point, kernel, 0)
        if out.dtype != work:
            out[here] = wide
    _check(broken, len(rows), least, code_range)
    return out


def once(x: Tensor, spec: QuantizationSpec, quantize: Callable[[], Tensor]) -> Tensor:
    """Return what `quantize` makes of `x`; modules that read one value with one spec, as query,
    key and value do, share it. It is kept with the value, for as long as that lives, and made
    anew where either was written to.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling() or x.is_inference():
        return quantize()
    kept: dict[QuantizationSpec, tuple[int, Tensor, int]] = x.__dict__.setdefault(
        "_quantized", {}
    )
    version, out, out_version = kept.get(spec, (-1, x, -1))
    if version != x._version or out_version != out._version:
        out = quantize()
        kept[spec] = x._version, out, out._version
    return out


def _broken(found: Range) -> int:
    """How many of the ranges have an end that is not finite."""
    low, high = found
    return int((~(low.isfinite() & high.isfinite())).sum())


def _check(broken: int, rows: int, least: float, code_range: CodeRange) -> None:
    """Raise ObservationError if no scale exists for `broken` of the rows, or for `least`, the
    least of all values.
    """
    if broken:
        where = (
            "this tensor holds" if rows == 1 else f"{broken} of {rows} rows of this tensor hold"
        )
        raise ObservationError(
            f"{where} NaN or infinity, and a range found at run time needs finite values."
        )
    if isinstance(code_range, IntegerRange) and code_range.nonnegative and least < 0:
        raise NegativeValuesError(
            f"The smallest value is {least:g}, and unsigned symmetric codes have no negative "
            "values; make it signed, or asymmetric."
        )
