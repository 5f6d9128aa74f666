"""Dynamic quantization: the range is found at run time, from the tensor or each of its rows."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import BLOCK_SIZE, fill
from quantizer.numerics.codes import work_dtype_of
from quantizer.numerics.formats import CodeRange, IntegerRange
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.qparams import (
    QParams,
    qparams_from_range,
    qparams_from_step,
    symmetric_step,
)
from quantizer.numerics.two_level import global_scale_of, with_global_scale
from quantizer.observers import ObservationError, check_has_codes, code_range_of, kernel_of
from quantizer.observers.observed_batch import as_rows, extremes

VALUES_AT_ONCE = 4 * BLOCK_SIZE
"""How many values are read for their ranges before they are quantized. So many stay in the
processor's cache, and one call computes the scales of several blocks.
"""


def dynamic_qparams(
    x: Tensor, spec: QuantizationSpec, tensor_scale: Tensor | None = None
) -> QParams:
    """Return scale and zero point for the least and greatest values of `x`.

    Both have the shape that `scale_shape` returns.

    Args:
        x: the tensor, of any floating-point dtype.
        spec: how it is quantized.
        tensor_scale: float32, (): the calibrated scale of the whole tensor, of which the scales
            of groups are multiples. None unless `spec.is_dynamic` is "local".

    Raises:
        ObservationError: there is NaN, infinity or a negative value without a code. While torch
            traces, that is not checked.
    """
    rows = as_rows(x, spec.cut)
    code_range = code_range_of(spec)
    # While torch compiles or exports, values are not known
    if torch.compiler.is_compiling():
        low = rows.amin(1)
        high = rows.amax(1)
    else:
        low, high = extremes(rows)
        least = float(low.min())
        _check(_not_finite(low, high), len(rows), least, code_range)
    if spec.is_dynamic == "local" and tensor_scale is not None:
        qparams = _local_qparams(low, high, code_range, tensor_scale)
    else:
        qparams = _qparams(low, high, code_range)
    shape = scale_shape(tuple(x.shape), spec.cut)
    return QParams(qparams.scale.view(shape), qparams.zero_point.view(shape))


def _qparams(low: Tensor, high: Tensor, code_range: CodeRange) -> QParams:
    """Return scale and zero point for the least and greatest values of rows.

    The length of an asymmetric range is rounded to float32, as engines do. Otherwise a fifth of
    the scales would differ from theirs in the last bit.

    Source: compressed-tensors 0.20, and `DynamicQuantizeLinear` of ONNX.
    """
    is_asymmetric = isinstance(code_range, IntegerRange) and not code_range.symmetric
    if not is_asymmetric or low.dtype == torch.float64:
        return qparams_from_range(low, high, code_range)
    length = high.float().clamp(min=0) - low.float().clamp(max=0)
    step = length.double() / code_range.span
    return qparams_from_step(step, low, code_range)


def _local_qparams(
    low: Tensor, high: Tensor, code_range: CodeRange, tensor_scale: Tensor
) -> QParams:
    """Return scale and zero point of groups whose tensor has a calibrated scale.

    The scales of groups are codes in fp8_e4m3 times one number. The calibrated scale, that of
    the largest value, is the largest code, 448. Larger scales are clipped to it.

    Args:
        low, high: the least and the greatest value of each group, [groups].
        code_range: the codes.
        tensor_scale: float32, ().

    Source: compressed-tensors, with the dynamic type "local".
    """
    largest = torch.maximum(-low, high).clamp(min=0)
    step = symmetric_step(largest.double(), code_range)
    scale = with_global_scale(step, global_scale_of(tensor_scale))
    return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))


def quantize_each_row(rows: Tensor, spec: QuantizationSpec, *, inplace: bool) -> Tensor:
    """Return each of `rows` quantized with the scale of its own range.

    Several rows at a time are read for their ranges and then quantized, while they are in the
    cache. The values are the same as with `dynamic_qparams`, unless the scales of rows depend
    on each other.

    Args:
        rows: [rows, values].
        spec: how they are quantized.
        inplace: overwrite `rows`.

    Raises:
        ObservationError: as in `dynamic_qparams`. `rows` may be overwritten by then.
    """
    code_range = code_range_of(spec)
    kernel = kernel_of(spec)
    out = rows if inplace else torch.empty_like(rows)
    work = work_dtype_of(spec, rows.dtype)
    height = max(1, VALUES_AT_ONCE // max(1, rows.shape[1]))
    broken = 0
    least = 0.0
    parts = zip(torch.split(rows, height), torch.split(out, height), strict=True)
    for part, out_part in parts:
        wide = part.to(work)
        low, high = extremes(wide)
        part_least = float(low.min())
        if not (math.isfinite(part_least) and math.isfinite(high.max())):
            broken += _not_finite(low, high)
        least = min(least, part_least)
        qparams = _qparams(low, high, code_range)
        # Without a conversion, the values go straight to the output
        target = wide if inplace or out.dtype != work else out_part
        fill(
            target, wide, kernel, scale=qparams.scale, zero_point=qparams.zero_point, ch_axis=0
        )
        if out.dtype != work:
            out_part.copy_(wide)
    _check(broken, len(rows), least, code_range)
    return out


def quantize_once(x: Tensor, spec: QuantizationSpec, quantize: Callable[[], Tensor]) -> Tensor:
    """Return the result of `quantize()`, the quantized `x`, from a cache if it is there.

    Modules that read one value with one spec, such as query, key and value projections, share
    the result. It is stored as an attribute of `x`. If `x` or the result was written to since,
    it is computed again.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling() or x.is_inference():
        return quantize()
    cache: dict[QuantizationSpec, tuple[int, Tensor, int]]
    cache = x.__dict__.setdefault("_quantized", {})
    version, out, out_version = cache.get(spec, (-1, x, -1))
    if version != x._version or out_version != out._version:
        out = quantize()
        cache[spec] = x._version, out, out._version
    return out


def _not_finite(low: Tensor, high: Tensor) -> int:
    """Return how many of the ranges have an end that is not finite."""
    return int((~(low.isfinite() & high.isfinite())).sum())


def _check(broken: int, rows: int, least: float, code_range: CodeRange) -> None:
    """Raise `ObservationError` if values have no scale or no code.

    Args:
        broken: how many rows have a value that is not finite.
        rows: how many rows there are.
        least: the least of all values.
        code_range: the codes.
    """
    if broken:
        where = "this tensor holds"
        if rows > 1:
            where = f"{broken} of {rows} rows of this tensor hold"
        raise ObservationError(
            f"{where} NaN or infinity, and a range found at run time needs finite values."
        )
    check_has_codes(least, code_range)
