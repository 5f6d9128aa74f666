"""Which specs of linear layers a compressed-tensors checkpoint cannot express, and why.

Source: the package compressed-tensors, 0.15 to 0.20; the layers that vLLM builds for them.
"""

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.export.compressed_tensors.schemes import FP4_FORMATS
from quantizer.export.exporter import Reason
from quantizer.numerics.qparams import qparams_from_range
from quantizer.observers import code_range_of

_PACKED_BITS = range(2, 9)
_MX_GROUP = 32
_NVFP4_GROUP = 16


def layer_weight_refusal(spec: QuantizationSpec, features: int) -> Reason | None:
    """Return why a linear layer's weight cannot be stored as codes; None if it can.

    Args:
        spec: of the weight.
        features: how many inputs it has.
    """
    reason = _format_refusal(spec)
    size = spec.group_size or -1
    if reason is None and spec.qscheme == "per_group" and size > 0 and features % size:
        return _partial_groups(size, features, "use <--deploy pt2>, or exclude the layer")
    return reason


def _partial_groups(size: int, features: int, remedy: str) -> Reason:
    return (
        f"has groups of {size} inputs, which do not divide its {features}, and readers take "
        "whole groups only",
        remedy,
    )


def _format_refusal(spec: QuantizationSpec) -> Reason | None:
    """Return why the format lacks the spec of a weight, with a remedy; None if it has it."""
    is_along_inputs = spec.ch_axis == 1
    if spec.dtype == "fp4":
        is_known = (spec.group_size, spec.scale_type) in FP4_FORMATS
        if spec.qscheme == "per_group" and is_along_inputs and is_known:
            return None
        return (
            "is fp4, but not in groups of 32 inputs with shared exponents (mxfp4) or of 16 "
            "with e4m3 scales (nvfp4)",
            'set its group_size to 16 and its scale_format to "e4m3"',
        )
    if spec.dtype not in ("int", "fp8_e4m3"):
        return (
            f"is {spec.dtype}, which the format lacks",
            "use int2 to int8, fp8_e4m3, mxfp4, mxfp8 or nvfp4 there",
        )
    if spec.dtype == "int" and spec.bit_width not in _PACKED_BITS:
        return (
            f"has {spec.bit_width} bits, and the format 2 to 8",
            "set its width to 8 bits or less",
        )
    if spec.qscheme == "per_channel" and spec.ch_axis != 0:
        return "has a scale for each input", "set its ch_axis to 0"
    if spec.qscheme == "per_group" and not is_along_inputs:
        return "has groups of outputs", "set its ch_axis to 1"
    is_mx = spec.scale_type == "e8m0" and spec.group_size == _MX_GROUP
    if spec.dtype != "int" and spec.qscheme == "per_group" and not is_mx:
        return (
            f"is {spec.dtype} in groups, which readers have with shared exponents for 32 "
            "inputs only (mxfp8)",
            "set its qscheme to per_channel, per_block or per_tensor",
        )
    return None


def input_refusal(
    spec: QuantizationSpec, weight: QuantizationSpec, rank: int, features: int
) -> Reason | None:
    """Return why a reader cannot quantize a layer's input as test mode does; None if it can.

    Args:
        spec: of the input.
        weight: the spec of the layer's weight.
        rank: how many axes the input has.
        features: the length of its last axis.
    """
    if weight.scale_type in ("e8m0", "e4m3") and weight.dtype != "int":
        return _microscaled_refusal(spec, weight, rank, features)
    if spec.dtype != weight.dtype or spec.dtype not in ("int", "fp8_e4m3"):
        return (
            f"and weight are {spec.dtype}/{weight.dtype}, which the format cannot combine",
            "use int8 or fp8_e4m3 for both, or leave the input float",
        )
    if spec.dtype == "int" and spec.bit_width != 8:
        return (
            f"has {spec.bit_width} bits, and engines compute in 8",
            "set its width to 8 bits, or leave it float",
        )
    if spec.round_mode != "half_even":
        return f"is rounded {spec.round_mode}", "set its round_mode to half_even"
    if spec.narrow_range:
        return "has a narrow range", "set its narrow_range to false"
    if weight.qscheme == "per_block" or spec.qscheme == "per_group":
        reason = _groups_refusal(spec, weight, features)
        if reason is not None:
            return reason
    if spec.is_dynamic:
        return _dynamic_refusal(spec, rank)
    if spec.qscheme != "per_tensor":
        return (
            f"is static {spec.qscheme}",
            "set its qscheme to per_tensor, or is_dynamic to true",
        )
    return None


def _groups_refusal(
    spec: QuantizationSpec, weight: QuantizationSpec, features: int
) -> Reason | None:
    """Return why engines do not combine an input with a weight in blocks, or inputs in groups
    with a weight.
    """
    if weight.qscheme != "per_block":
        return (
            f"is dynamic {spec.qscheme}, and engines have that with weights in blocks only",
            "set its qscheme to per_token, with ch_axis -1",
        )
    size = weight.group_size or 1
    is_alike = spec.qscheme == "per_group" and spec.group_size == size
    if not is_alike or not spec.is_dynamic:
        return (
            f"meets a weight in blocks of {size}, and engines then have dynamic groups of "
            f"{size} inputs",
            f"set its qscheme to per_group, with ch_axis -1 and group_size {size}, and its "
            "is_dynamic to true",
        )
    if features % size:
        return _partial_groups(size, features, "leave the input float, or exclude the layer")
    return None


def _microscaled_refusal(
    spec: QuantizationSpec, weight: QuantizationSpec, rank: int, features: int
) -> Reason | None:
    """Return why a reader cannot quantize the input of a weight in mxfp4, mxfp8 or nvfp4."""
    if weight.scale_type == "e4m3":
        return _nvfp4_refusal(spec, rank, features)
    is_alike = (spec.dtype, spec.qscheme) == (weight.dtype, "per_group")
    is_along_features = spec.ch_axis in (-1, rank - 1) and spec.group_size == _MX_GROUP
    if not (is_alike and is_along_features and spec.is_dynamic):
        return (
            f"meets a weight in mx{weight.dtype[:3]}, and readers then have dynamic groups of "
            f"32 inputs in {weight.dtype}",
            f"set its dtype to {weight.dtype}, its qscheme to per_group, with ch_axis -1 and "
            "group_size 32, and its is_dynamic to true",
        )
    if weight.dtype == "fp4" and (spec.scale_type, spec.scale_mode) != ("e8m0", "even"):
        return (
            "finds its exponents in another way than readers, which round the largest value "
            "first",
            "set its scale_calculation_mode to even",
        )
    if weight.dtype != "fp4" and spec.scale_type != "poweroftwo":
        return (
            "finds its exponents in another way than readers, which take the least power of "
            "two that clips nothing",
            'write "dtype": "fp8_e4m3" and "scale_type": "pof2" for it',
        )
    if features % _MX_GROUP:
        remedy = "leave the input float, or exclude the layer"
        return _partial_groups(_MX_GROUP, features, remedy)
    return None


def _nvfp4_refusal(spec: QuantizationSpec, rank: int, features: int) -> Reason | None:
    """Return why a reader cannot quantize the input of a weight in nvfp4."""
    is_along_features = spec.ch_axis in (-1, rank - 1) and spec.group_size == _NVFP4_GROUP
    is_alike = spec.dtype == "fp4" and spec.scale_type == "e4m3" and is_along_features
    if is_alike and spec.is_dynamic is True:
        return (
            "finds the factor of its groups at run time, and readers have that of calibration "
            "(input_global_scale)",
            'set its is_dynamic to "local"',
        )
    if not is_alike or not spec.is_dynamic:
        return (
            "meets a weight in nvfp4, and readers then have groups of 16 inputs in fp4 with a "
            "calibrated factor",
            'write "dtype": "fp4", "scale_format": "e4m3", "ch_axis": -1 and "is_dynamic": '
            '"local" for it, or leave the input float',
        )
    if features % _NVFP4_GROUP:
        remedy = "leave the input float, or exclude the layer"
        return _partial_groups(_NVFP4_GROUP, features, remedy)
    return None


def _dynamic_refusal(spec: QuantizationSpec, rank: int) -> Reason | None:
    """Return why readers cannot find the scale of a spec at run time."""
    is_last_axis = spec.ch_axis in (None, -1, rank - 1)
    is_known = spec.qscheme in ("per_tensor", "per_token", "per_group")
    if not is_known or not is_last_axis:
        return f"is dynamic {spec.qscheme}", "set its qscheme to per_token, with ch_axis -1"
    difference = scale_difference(spec)
    if difference is None:
        return None
    return (
        difference,
        "set its symmetric to false and its scale_type to float, or its is_dynamic to false",
    )


def scale_difference(spec: QuantizationSpec) -> str | None:
    """Return how the dynamic scale of a spec differs from the reader's, None if it does not.

    The reader divides half the range by half the number of codes, or by the largest fp8.
    """
    low, high = torch.tensor(-1.0), torch.tensor(1.0)
    scale = qparams_from_range(low, high, code_range_of(spec)).scale
    reader_divisor = 127.5 if spec.dtype == "int" else 448.0
    if scale == torch.tensor(1 / reader_divisor):
        return None
    return (
        f"is dynamic with the scale absmax / {1 / float(scale):g}, and readers have absmax / "
        f"{reader_divisor:g}"
    )
