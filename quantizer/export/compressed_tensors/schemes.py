"""A linear layer's specs in the words of compressed-tensors, its tensors in their layout, and
what has no words there.

Knows no network and writes nothing. Source: the package compressed-tensors, 0.15 to 0.20.
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

PACKED, INT8, FP8 = "pack-quantized", "int-quantized", "float-quantized"
MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
BITS = range(2, 9)
"""Of packed integers."""
_FP4 = {(32, "e8m0"): MXFP4, (16, "e4m3"): NVFP4}
"""The format of fp4 weights, by their group size and scale type."""
BYTE = 8
WORD = 4
"""Bytes of the words that codes are packed into."""

Reason = tuple[str, str]
"""Why, and what to change."""


@dataclass(frozen=True)
class CompressedLayer:
    """How a linear layer is quantized: its weight with codes, and its input, which may stay
    float.
    """

    weight: QuantizedTensor
    input: QuantizedTensor | None = None

    @property
    def format(self) -> str:
        """The layout of its tensors."""
        return format_of(self.weight.spec, self.input.spec if self.input else None)

    @property
    def scheme(self) -> dict[str, Any]:
        """Its group in `config_groups`, without the targets."""
        inputs = _input_words(self.input.spec) if self.input else None
        words = _weight_words(self.weight.spec, self.weight.scale)
        return {"weights": words, "input_activations": inputs, "format": self.format}

    def tensors(self) -> dict[str, Tensor]:
        """What the file holds of it, by the names that follow its path.

        Raises:
            ValueError: its weight has no codes.
        """
        weight = self.weight
        if weight.codes is None:
            raise ValueError("Only a weight that was encoded can be packed.")
        found = _LAYOUTS[self.format](weight, weight.codes)
        if self.input is not None and not self.input.spec.is_dynamic:
            found["input_scale"] = self.input.scale.reshape(1)
            if not is_symmetric(self.input.spec):
                found["input_zero_point"] = _signed(
                    self.input.zero_point, self.input.spec
                ).reshape(1)
        return found


def format_of(weight: QuantizationSpec, inputs: QuantizationSpec | None) -> str:
    """The layout of a layer's tensors."""
    if weight.dtype == "int":
        return INT8 if weight.bit_width == BYTE and inputs is not None else PACKED
    return (
        FP8 if weight.dtype == "fp8_e4m3" else _FP4[weight.group_size or 0, weight.scale_type]
    )


def is_symmetric(spec: QuantizationSpec) -> bool:
    """Whether zero is the code in the middle, so that no zero point is stored."""
    return spec.dtype != "int" or (spec.signed and spec.symmetric)


def weight_refusal(spec: QuantizationSpec) -> Reason | None:
    """Why a linear layer's weight cannot be stored as codes; None if it can."""
    last, first = spec.ch_axis in (1, -1), spec.ch_axis in (0, -2)
    if spec.dtype == "fp4":
        if spec.qscheme == "per_group" and last and (spec.group_size, spec.scale_type) in _FP4:
            return None
        why = (
            "is fp4, but not in groups of 32 inputs with shared exponents (mxfp4) or of 16 "
            "with e4m3 scales (nvfp4)"
        )
        return why, 'set its group_size to 16 and its scale_format to "e4m3"'
    if spec.dtype not in ("int", "fp8_e4m3"):
        return (
            f"is {spec.dtype}, which the format lacks",
            "use int2 to int8, fp8_e4m3, mxfp4 or nvfp4 there",
        )
    if spec.dtype == "int" and spec.bit_width not in BITS:
        return (
            f"has {spec.bit_width} bits, and the format 2 to 8",
            "set its width to 8 bits or less",
        )
    if spec.qscheme == "per_channel" and not first:
        return "has a scale for each input", "set its ch_axis to 0"
    if spec.qscheme == "per_group" and not last:
        return "has groups of outputs", "set its ch_axis to 1"
    if spec.dtype != "int" and spec.qscheme == "per_group":
        return (
            f"is {spec.dtype} in groups, which readers lack",
            "set its qscheme to per_channel or per_tensor",
        )
    return None


def input_refusal(spec: QuantizationSpec, weight: QuantizationSpec, rank: int) -> Reason | None:
    """Why a reader cannot quantize the input, of `rank` axes, of a layer with such a weight as
    test mode does.

    None if it can.
    """
    kinds = (spec.dtype, weight.dtype)
    if kinds not in (("int", "int"), ("fp8_e4m3", "fp8_e4m3")):
        said = "/".join("int" if kind == "int" else kind for kind in kinds)
        return (
            f"and weight are {said}, which the format cannot combine",
            "use int8 or fp8_e4m3 for both, or leave the input float",
        )
    if spec.dtype == "int" and spec.bit_width != BYTE:
        return (
            f"has {spec.bit_width} bits, and engines compute in 8",
            "set its width to 8 bits, or leave it float",
        )
    if spec.round_mode != "half_even":
        return f"is rounded {spec.round_mode}", "set its round_mode to half_even"
    if spec.narrow_range:
        return "has a narrow range", "set its narrow_range to false"
    if not spec.is_dynamic:
        per_tensor = spec.qscheme == "per_tensor"
        return (
            None
            if per_tensor
            else (
                f"is static {spec.qscheme}",
                "set its qscheme to per_tensor, or is_dynamic to true",
            )
        )
    if spec.qscheme not in ("per_tensor", "per_token") or spec.ch_axis not in (
        None,
        -1,
        rank - 1,
    ):
        return f"is dynamic {spec.qscheme}", "set its qscheme to per_token, with ch_axis -1"
    return _dynamic_refusal(spec)


def _dynamic_refusal(spec: QuantizationSpec) -> Reason | None:
    """Why the scale that is found at run time is another one than the reader's: half the range
    by half the codes.
    """
    ends = torch.tensor(-1.0), torch.tensor(1.0)
    ours, readers = (
        qparams_from_range(*ends, code_range_of(spec)).scale,
        448.0 if spec.dtype != "int" else 127.5,
    )
    if ours == torch.tensor(1 / readers):
        return None
    why = (
        f"is dynamic with the scale absmax / {1 / float(ours):g}, where readers have absmax / "
        f"{readers:g}"
    )
    return (
        why,
        "set its symmetric to false and its scale_type to float, or its is_dynamic to false",
    )


def _weight_words(spec: QuantizationSpec, scale: Tensor) -> dict[str, Any]:
    words = _words(spec) | {"dynamic": False}
    if spec.scale_type == "e4m3" and spec.dtype == "fp4":
        kinds = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
        return words | {"strategy": "tensor_group", "group_size": spec.group_size} | kinds
    if spec.qscheme == "per_group" and scale.shape[-1] > 1:
        words |= {"strategy": "group", "group_size": spec.group_size}
    else:
        per_tensor = spec.qscheme == "per_tensor" and spec.dtype != "int"
        words |= {"strategy": "tensor" if per_tensor else "channel", "group_size": None}
    return words | (
        {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"} if spec.dtype == "fp4" else {}
    )


def _input_words(spec: QuantizationSpec) -> dict[str, Any]:
    strategy = "token" if spec.qscheme == "per_token" else "tensor"
    return _words(spec) | {"dynamic": spec.is_dynamic, "strategy": strategy}


def _words(spec: QuantizationSpec) -> dict[str, Any]:
    bits = {"int": spec.bit_width, "fp8_e4m3": 8, "fp4": 4}[spec.dtype]
    kind = "int" if spec.dtype == "int" else "float"
    return {"num_bits": bits, "type": kind, "symmetric": is_symmetric(spec)}


def _packed(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Codes from 0 on, each row a stream of bits in words; zero points likewise, but along the
    rows.
    """
    spec = weight.spec
    found = {
        "weight_packed": _words_of(_unsigned(codes, spec), spec.bit_width),
        "weight_scale": by_row(weight.scale, codes),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not is_symmetric(spec):
        columns = by_row(weight.zero_point, codes).t()
        found["weight_zero_point"] = _words_of(_unsigned(columns, spec), spec.bit_width).t()
    return found


def _int8(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    found = {"weight": _signed(codes, weight.spec), "weight_scale": by_row(weight.scale, codes)}
    if not is_symmetric(weight.spec):
        found["weight_zero_point"] = _signed(by_row(weight.zero_point, codes), weight.spec)
    return found


def _fp8(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    scale = (
        weight.scale.reshape(1)
        if weight.spec.qscheme == "per_tensor"
        else by_row(weight.scale, codes)
    )
    return {"weight": codes, "weight_scale": scale}


def _fp4(weight: QuantizedTensor, codes: Tensor) -> dict[str, Tensor]:
    """Scales are exponents with 127 added, or fp8 numbers that `weight_global_scale`
    divides.
    """
    found = {"weight_packed": pack(codes, weight.spec).view(len(codes), -1)}
    parts = pack_scales(weight.scale, weight.spec.scale_type)
    if "global_scale" in parts:
        found["weight_global_scale"] = parts["global_scale"].reshape(1)
    return found | {"weight_scale": parts["scale"]}


_LAYOUTS = {PACKED: _packed, INT8: _int8, FP8: _fp8, MXFP4: _fp4, NVFP4: _fp4}


def _words_of(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as int32, the first code in the lowest bits, filled up with zeros."""
    stream = pack_bits(codes.contiguous(), bits)
    # Of one row, any stride counts as contiguous
    flat = pad(stream, (0, -stream.shape[-1] % WORD)).reshape(-1)
    return flat.view(torch.int32).view(len(codes), -1)


def by_row(values: Tensor, codes: Tensor) -> Tensor:
    """Scales or zero points as [outputs, groups]; those of a tensor once for each output."""
    groups = values.reshape(len(codes), -1) if values.dim() else values.expand(len(codes), 1)
    return groups.contiguous()


def _unsigned(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    return (codes.int() + _middle(spec) if is_symmetric(spec) else codes).to(torch.uint8)


def _signed(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    return (codes if is_symmetric(spec) else codes.int() - _middle(spec)).to(torch.int8)


def _middle(spec: QuantizationSpec) -> int:
    return 1 << (spec.bit_width - 1)
