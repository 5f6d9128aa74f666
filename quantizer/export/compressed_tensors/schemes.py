"""How compressed-tensors describes and stores a quantized linear layer, and what it cannot.

Source: the package compressed-tensors, 0.15 to 0.20.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import pack, pack_bits
from quantizer.numerics.qparams import qparams_from_range
from quantizer.numerics.two_level import pack_scales
from quantizer.observers import code_range_of

PACKED_FORMAT = "pack-quantized"
_INT8_FORMAT = "int-quantized"
_FP8_FORMAT = "float-quantized"
MXFP4_FORMAT = "mxfp4-pack-quantized"
NVFP4_FORMAT = "nvfp4-pack-quantized"
# The format of fp4 weights, by their group size and scale type.
_FP4_FORMATS = {(32, "e8m0"): MXFP4_FORMAT, (16, "e4m3"): NVFP4_FORMAT}
_PACKED_BITS = range(2, 9)
# Codes are packed into words of 4 bytes.
_WORD_BYTES = 4

Reason = tuple[str, str]
"""Why something is refused, and what to change."""


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
            return _FP8_FORMAT
        if spec.dtype != "int":
            return _FP4_FORMATS[spec.group_size or 0, spec.scale_type]
        if spec.bit_width == 8 and self.input is not None:
            return _INT8_FORMAT
        return PACKED_FORMAT

    @property
    def scheme(self) -> dict[str, Any]:
        """Return its group in `config_groups`, without the targets."""
        input_activations = None
        if self.input is not None:
            input_activations = _input_scheme(self.input.spec)
        return {
            "weights": _weight_scheme(self.weight.spec, self.weight.scale),
            "input_activations": input_activations,
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
        if self.format in _FP4_FORMATS.values():
            tensors = _fp4_layout(weight, weight.codes, self.global_scale)
        else:
            tensors = _LAYOUTS[self.format](weight, weight.codes)
        if self.input is not None and not self.input.spec.is_dynamic:
            tensors["input_scale"] = self.input.scale.reshape(1)
            if not is_symmetric(self.input.spec):
                zero_point = _as_signed(self.input.zero_point, self.input.spec)
                tensors["input_zero_point"] = zero_point.reshape(1)
        return tensors


def engine_words(weight: QuantizationSpec, inputs: QuantizationSpec | None) -> tuple[Any, ...]:
    """Return what must be equal in layers that an engine fuses.

    Args:
        weight: the spec of a layer's weight.
        inputs: the spec of its input, None if that stays float.
    """
    words: list[Any] = []
    for spec in (weight, inputs):
        if spec is None:
            words.append(None)
            continue
        words.append((spec.dtype, spec.bit_width, is_symmetric(spec), spec.is_dynamic))
        words.append((spec.qscheme, spec.group_size, spec.scale_type))
    return tuple(words)


def is_symmetric(spec: QuantizationSpec) -> bool:
    """Return whether zero is the code in the middle, so that no zero point is stored."""
    return spec.dtype != "int" or (spec.signed and spec.symmetric)


def layer_weight_refusal(spec: QuantizationSpec) -> Reason | None:
    """Return why a linear layer's weight cannot be stored as codes; None if it can."""
    is_along_inputs = spec.ch_axis in (1, -1)
    if spec.dtype == "fp4":
        is_known = (spec.group_size, spec.scale_type) in _FP4_FORMATS
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
            "use int2 to int8, fp8_e4m3, mxfp4 or nvfp4 there",
        )
    if spec.dtype == "int" and spec.bit_width not in _PACKED_BITS:
        return (
            f"has {spec.bit_width} bits, and the format 2 to 8",
            "set its width to 8 bits or less",
        )
    if spec.qscheme == "per_channel" and spec.ch_axis not in (0, -2):
        return "has a scale for each input", "set its ch_axis to 0"
    if spec.qscheme == "per_group" and not is_along_inputs:
        return "has groups of outputs", "set its ch_axis to 1"
    if spec.dtype != "int" and spec.qscheme == "per_group":
        return (
            f"is {spec.dtype} in groups, which readers lack",
            "set its qscheme to per_channel or per_tensor",
        )
    return None


def input_refusal(spec: QuantizationSpec, weight: QuantizationSpec, rank: int) -> Reason | None:
    """Return why a reader cannot quantize a layer's input as test mode does; None if it can.

    Args:
        spec: of the input, which has `rank` axes.
        weight: the spec of the layer's weight.
    """
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
    if spec.is_dynamic:
        return _dynamic_refusal(spec, rank)
    if spec.qscheme != "per_tensor":
        return (
            f"is static {spec.qscheme}",
            "set its qscheme to per_tensor, or is_dynamic to true",
        )
    return None


def _dynamic_refusal(spec: QuantizationSpec, rank: int) -> Reason | None:
    """Return why readers cannot find the scale of a spec at run time."""
    is_last_axis = spec.ch_axis in (None, -1, rank - 1)
    if spec.qscheme not in ("per_tensor", "per_token") or not is_last_axis:
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


def _weight_scheme(spec: QuantizationSpec, scale: Tensor) -> dict[str, Any]:
    scheme = _common_scheme(spec)
    scheme["dynamic"] = False
    scheme["strategy"] = "channel"
    scheme["group_size"] = None
    if spec.dtype == "fp4" and spec.scale_type == "e4m3":
        scheme["strategy"] = "tensor_group"
        scheme["group_size"] = spec.group_size
    elif spec.qscheme == "per_group" and scale.shape[-1] > 1:
        scheme["strategy"] = "group"
        scheme["group_size"] = spec.group_size
    elif spec.qscheme == "per_tensor" and spec.dtype != "int":
        scheme["strategy"] = "tensor"
    if spec.dtype == "fp4":
        is_fp8_scale = spec.scale_type == "e4m3"
        dtype = "torch.float8_e4m3fn" if is_fp8_scale else "torch.uint8"
        scheme |= {"scale_dtype": dtype, "zp_dtype": dtype}
    return scheme


def _input_scheme(spec: QuantizationSpec) -> dict[str, Any]:
    strategy = "token" if spec.qscheme == "per_token" else "tensor"
    return _common_scheme(spec) | {"dynamic": spec.is_dynamic, "strategy": strategy}


def _common_scheme(spec: QuantizationSpec) -> dict[str, Any]:
    bits = {"int": spec.bit_width, "fp8_e4m3": 8, "fp4": 4}[spec.dtype]
    kind = "int" if spec.dtype == "int" else "float"
    return {"num_bits": bits, "type": kind, "symmetric": is_symmetric(spec)}


def _packed_layout(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Return codes from 0 on, each row a stream of bits in words.

    Zero points are packed likewise, but along the rows.
    """
    spec = weight.spec
    tensors = {
        "weight_packed": _pack_words(_as_unsigned(codes, spec), spec.bit_width),
        "weight_scale": scales_by_row(weight.scale, codes),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not is_symmetric(spec):
        columns = scales_by_row(weight.zero_point, codes).t()
        words = _pack_words(_as_unsigned(columns, spec), spec.bit_width)
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
    else:
        scale = scales_by_row(weight.scale, codes)
    return {"weight": codes, "weight_scale": scale}


def _fp4_layout(
    weight: QuantizedTensor,
    codes: Tensor,
    global_scale: Tensor | None,
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
}


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return rows of codes as int32, the first code in the lowest bits, padded with zeros."""
    stream = pack_bits(codes.contiguous(), bits)
    padded = pad(stream, (0, -stream.shape[-1] % _WORD_BYTES))
    # Flattened first: with one row, any stride counts as contiguous, but `view` needs stride 1.
    return padded.reshape(-1).view(torch.int32).view(len(codes), -1)


def scales_by_row(values: Tensor, codes: Tensor) -> Tensor:
    """Return scales or zero points as [outputs, groups]; one of a tensor is repeated."""
    if values.dim():
        groups = values.reshape(len(codes), -1)
    else:
        groups = values.expand(len(codes), 1)
    return groups.contiguous()


def _as_unsigned(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    if is_symmetric(spec):
        codes = codes.int() + _middle(spec)
    return codes.to(torch.uint8)


def _as_signed(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    if not is_symmetric(spec):
        codes = codes.int() - _middle(spec)
    return codes.to(torch.int8)


def _middle(spec: QuantizationSpec) -> int:
    return 1 << (spec.bit_width - 1)
