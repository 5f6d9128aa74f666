"""How compressed-tensors describes and stores a quantized linear layer.

Source: the package compressed-tensors, 0.15 to 0.20.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantizer.config.model import QuantizationSpec
from quantizer.export.limits import is_symmetric
from quantizer.export.model_tensors import scales_by_row
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.codes import pack, pack_bits
from quantizer.numerics.qparams import qparams_from_range
from quantizer.numerics.two_level import global_scale_of, pack_scales
from quantizer.observers import code_range_of

PACKED_FORMAT = "pack-quantized"
_INT8_FORMAT = "int-quantized"
_FP8_FORMAT = "float-quantized"
MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP8_FORMAT = "mxfp8-quantized"
NVFP4_FORMAT = "nvfp4-pack-quantized"
# The format of fp4 weights, by their group size and scale type.
FP4_FORMATS = {(32, "e8m0"): MXFP4_FORMAT, (16, "e4m3"): NVFP4_FORMAT}
# Codes are packed into words of 4 bytes.
_WORD_BYTES = 4
_SCALE_DTYPES = {
    "e8m0": "torch.uint8",
    "poweroftwo": "torch.uint8",
    "e4m3": "torch.float8_e4m3fn",
}
_LARGEST_GROUP = 128
"""The largest group that engines have kernels for. A larger one is a channel if it is a row."""
_INPUT_STRATEGIES = {"per_tensor": "tensor", "per_token": "token", "per_group": "group"}


@dataclass(frozen=True)
class CompressedLayer:
    """A quantized linear layer: its weight with codes, and its input, which may stay float.

    Attributes:
        global_scale: the factor of nvfp4 scales that fused layers share; None for its own.
    """

    weight: QuantizedTensor
    input: QuantizedTensor | None = None
    global_scale: Tensor | None = None

    @property
    def format(self) -> str:
        """Return the layout of its tensors."""
        spec = self.weight.spec
        if spec.dtype == "fp8_e4m3":
            return MXFP8_FORMAT if spec.scale_type == "e8m0" else _FP8_FORMAT
        if spec.dtype != "int":
            return FP4_FORMATS[spec.group_size or 0, spec.scale_type]
        if spec.bit_width == 8 and self.input is not None:
            return _INT8_FORMAT
        return PACKED_FORMAT

    @property
    def scheme(self) -> dict[str, Any]:
        """Return its group in `config_groups`, without the targets."""
        inputs = self.input
        return {
            "weights": _weight_scheme(self.weight.spec, self.weight.scale),
            "input_activations": None if inputs is None else _input_scheme(inputs.spec),
            "format": self.format,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return what the file holds of it, by the names that follow its path.

        Raises:
            ValueError: its weight has no codes.
        """
        weight = self.weight
        if weight.codes is None:
            raise ValueError("Only a weight that was encoded can be packed.")
        if self.format in FP4_FORMATS.values():
            tensors = _fp4_layout(weight, weight.codes, self.global_scale)
        else:
            tensors = _LAYOUTS[self.format](weight, weight.codes)
        inputs = self.input
        if inputs is not None and inputs.spec.is_dynamic == "local":
            tensors["input_global_scale"] = global_scale_of(inputs.scale).reshape(1)
        if inputs is not None and not inputs.spec.is_dynamic:
            tensors["input_scale"] = inputs.scale.reshape(1)
            if not is_symmetric(inputs.spec):
                zero_point = _as_signed(inputs.zero_point, inputs.spec)
                tensors["input_zero_point"] = zero_point.reshape(1)
        return tensors


def _weight_scheme(spec: QuantizationSpec, scale: Tensor) -> dict[str, Any]:
    """Return the entry of the config that says how a weight is quantized."""
    is_usual = 0 < (spec.group_size or 0) <= _LARGEST_GROUP
    has_groups = spec.qscheme == "per_group" and (is_usual or scale.shape[-1] > 1)
    scheme = _common_scheme(spec)
    scheme["dynamic"] = False
    scheme["strategy"] = "channel"
    scheme["group_size"] = None
    if has_groups:
        is_nvfp4 = spec.dtype == "fp4" and spec.scale_type == "e4m3"
        scheme["strategy"] = "tensor_group" if is_nvfp4 else "group"
        scheme["group_size"] = spec.group_size
    elif spec.qscheme == "per_block":
        scheme["strategy"] = "block"
        scheme["block_structure"] = [spec.group_size, spec.group_size]
    elif spec.qscheme == "per_tensor" and spec.dtype != "int":
        scheme["strategy"] = "tensor"
    return scheme


def _input_scheme(spec: QuantizationSpec) -> dict[str, Any]:
    scheme = _common_scheme(spec) | {"dynamic": spec.is_dynamic}
    scheme["strategy"] = _INPUT_STRATEGIES[spec.qscheme]
    if spec.is_dynamic == "local":
        scheme["strategy"] = "tensor_group"
    if spec.qscheme == "per_group":
        scheme["group_size"] = spec.group_size
    return scheme


def _common_scheme(spec: QuantizationSpec) -> dict[str, Any]:
    bits = {"int": spec.bit_width, "fp8_e4m3": 8, "fp4": 4}[spec.dtype]
    kind = "int" if spec.dtype == "int" else "float"
    scheme = {"num_bits": bits, "type": kind, "symmetric": is_symmetric(spec)}
    # Of scales that a group has in few bits
    dtype = _SCALE_DTYPES.get(spec.scale_type)
    if dtype is not None and spec.dtype != "int" and spec.qscheme == "per_group":
        scheme |= {"scale_dtype": dtype, "zp_dtype": dtype}
    return scheme


def _packed_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Return codes from 0 on, each row a stream of bits in words.

    Zero points are packed likewise, but along the rows.
    """
    spec = weight.spec
    tensors = {
        "weight_packed": pack_words(as_unsigned(codes, spec), spec.bit_width),
        "weight_scale": scales_by_row(weight.scale, codes),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not is_symmetric(spec):
        columns = scales_by_row(weight.zero_point, codes).t()
        words = pack_words(as_unsigned(columns, spec), spec.bit_width)
        tensors["weight_zero_point"] = words.t()
    return tensors


def _int8_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    tensors = {
        "weight": _as_signed(codes, weight.spec),
        "weight_scale": scales_by_row(weight.scale, codes),
    }
    if not is_symmetric(weight.spec):
        zero_point = scales_by_row(weight.zero_point, codes)
        tensors["weight_zero_point"] = _as_signed(zero_point, weight.spec)
    return tensors


def _fp8_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    if weight.spec.qscheme == "per_tensor":
        scale = weight.scale.reshape(1)
    elif weight.spec.qscheme == "per_block":
        scale = weight.scale
    else:
        scale = scales_by_row(weight.scale, codes)
    return {"weight": codes, "weight_scale": scale}


def _mxfp8_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Return codes with scales that are exponents plus 127."""
    scales = pack_scales(weight.scale, weight.spec.scale_type)
    return {"weight": codes, "weight_scale": scales["scale"]}


def _fp4_layout(
    weight: QuantizedTensor, codes: Tensor, global_scale: Tensor | None
) -> dict[str, Tensor]:
    """Return codes with scales that are exponents plus 127, or fp8 numbers.

    fp8 numbers are divided by `weight_global_scale`.
    """
    tensors = {"weight_packed": pack(codes, weight.spec).view(len(codes), -1)}
    parts = pack_scales(weight.scale, weight.spec.scale_type, global_scale)
    if "global_scale" in parts:
        tensors["weight_global_scale"] = parts["global_scale"].reshape(1)
    tensors["weight_scale"] = parts["scale"]
    return tensors


_LAYOUTS = {
    PACKED_FORMAT: _packed_layout,
    _INT8_FORMAT: _int8_layout,
    _FP8_FORMAT: _fp8_layout,
    MXFP8_FORMAT: _mxfp8_layout,
}


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return rows of codes as int32, the first code in the lowest bits, padded with zeros."""
    stream = pack_bits(codes.contiguous(), bits)
    padded = pad(stream, (0, -stream.shape[-1] % _WORD_BYTES))
    # Flattened first: with one row, any stride counts as contiguous, but `view` needs stride 1.
    return padded.reshape(-1).view(torch.int32).view(len(codes), -1)


def as_unsigned(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    """Return integer codes from 0 on, as uint8."""
    if is_symmetric(spec):
        codes = codes.int() + _middle(spec)
    return codes.to(torch.uint8)


def _as_signed(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    if not is_symmetric(spec):
        codes = codes.int() - _middle(spec)
    return codes.to(torch.int8)


def _middle(spec: QuantizationSpec) -> int:
    return 1 << (spec.bit_width - 1)


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
