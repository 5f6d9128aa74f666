"""Weights as integer codes with a DequantizeLinear. Knows no network."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx_nodes import Emission, Quantization
from quantizer.export.onnx_tensors import INT32, Carrier, carrier_of
from quantizer.numerics.granularity import from_rows, to_rows

BLOCKS = 21
"""The first operator set whose DequantizeLinear has a block_size."""


def quantize_weights(wanted: Quantization, values: Tensor, name: str, opset: int) -> Emission | None:
    """Codes, scale, zero point and the node that makes `values` of them under `name`; None where floats have to stay.

    Floats stay, exact as they are, in floating-point formats, in groups before operator set 21, and where float32
    cannot compute the value from the code, as of more than 24 bits. `values` are what the codes stand for.
    """
    spec = wanted.spec
    carrier = _carrier(wanted, opset)
    if carrier is None or wanted.codes is None:
        return None
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    scale, zero_point = wanted.scale.reshape(-1, 1), wanted.zero_point.reshape(-1, 1)
    # As DequantizeLinear computes it: in float32.
    restored = (to_rows(wanted.codes, *cut).to(torch.int64) - zero_point).to(torch.float32) * scale
    if not torch.equal(from_rows(restored, tuple(values.shape), *cut), values):
        return None
    emission = Emission(f"{wanted.layer}.{wanted.role}")
    inputs = [emission.codes("codes", wanted.codes, carrier), emission.constant("scale", _placed(wanted.scale, spec))]
    if carrier is not INT32:
        inputs.append(emission.codes("zero_point", _placed(wanted.zero_point, spec), carrier))
    emission.add("DequantizeLinear", *inputs, output=name, **_attributes(spec, values))
    return emission


def _placed(scales: Tensor, spec: QuantizationSpec) -> Tensor:
    """Scales of groups where ONNX has them: along the axis that is cut."""
    return scales.movedim(-1, spec.ch_axis) if spec.qscheme == "per_group" and spec.ch_axis is not None else scales


def _attributes(spec: QuantizationSpec, values: Tensor) -> dict[str, int]:
    if spec.ch_axis is None:
        return {}
    if spec.qscheme != "per_group":
        return {"axis": spec.ch_axis}
    whole = spec.group_size in (None, -1)
    return {"axis": spec.ch_axis, "block_size": values.shape[spec.ch_axis] if whole else int(spec.group_size or 0)}


def _carrier(wanted: Quantization, opset: int) -> Carrier | None:
    """The type of the codes; DequantizeLinear takes 32-bit ones without a zero point, and groups from set 21 on."""
    if wanted.spec.dtype != "int" or (wanted.spec.qscheme == "per_group" and opset < BLOCKS):
        return None
    narrow = carrier_of(wanted.spec, opset)
    if narrow is not None or wanted.zero_point.any() or wanted.spec.quant_max > INT32.high:
        return narrow
    return INT32
