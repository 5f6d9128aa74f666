"""The conventions of each value of `--onnx_profile`: a row for each. The passes read the rows,
and no pass asks which profile it is.
"""

from dataclasses import dataclass
from enum import Enum

from quantizer.config.model import QuantizationSpec
from quantizer.export.arithmetic.biases import BiasForm
from quantizer.export.limits import (
    INTEGERS,
    POWERS_OR_ZERO_POINTS,
    SIGNED_CODES,
    STATIC_RANGES,
    WHOLE_TYPES,
    Limits,
    of_bits,
    rounded_by,
)
from quantizer.numerics.rounding import NEAREST

_FLOAT = "leave it float"
_INT8_WEIGHTS = (INTEGERS, STATIC_RANGES, of_bits(range(1, 9)), SIGNED_CODES)


class LinearForm(Enum):
    """The operators of a linear layer.

    SUBTRACTED: MatMul, then Sub of the negated bias, which ONNX Runtime does not fuse.
    ADDED: MatMul, then Add.
    GEMM: Gemm, which takes the bias as an operand, on inputs of two dimensions.
    """

    SUBTRACTED = "subtracted"
    ADDED = "added"
    GEMM = "gemm"


@dataclass(frozen=True)
class Conventions:
    """How one profile writes a network.

    Attributes:
        activations, weights: what the engine takes of them; None for ONNX Runtime, which reads
            the whole format.
        unsigned_bits: the widths of the integers whose signed codes of activations become
            unsigned ones with another zero point.
        keeps_powers_signed: whether codes with power-of-two scales stay signed all the same.
        biases: the form of biases.
        linear: the form of linear layers.
        rounds_half_even: whether QuantizeLinear rounds activations, with every rounding mode.
        is_for_kernels: whether the file is shaped for the kernels of ONNX Runtime and OpenVINO.
        is_packed: whether weights in groups become MatMulNBits.
        quantizes_gates: whether the gates of hard-swish and SiLU get 8 bits.
        decodes_ahead: whether the weights of linear layers with float inputs become floats when
            the file is loaded. Otherwise ONNX Runtime rounds their inputs to 8 bits.
        is_tuned: whether activations stay in float where integers are slower on this machine.
        wraps_operators: whether values are quantized between the operators that move or cut
            them, too.
    """

    activations: Limits | None = None
    weights: Limits | None = None
    unsigned_bits: tuple[int, ...] = (8,)
    keeps_powers_signed: bool = False
    biases: BiasForm = BiasForm.KERNELS
    linear: LinearForm = LinearForm.SUBTRACTED
    rounds_half_even: bool = False
    is_for_kernels: bool = True
    is_packed: bool = False
    quantizes_gates: bool = False
    decodes_ahead: bool = False
    is_tuned: bool = False
    wraps_operators: bool = False

    def makes_unsigned(self, spec: QuantizationSpec, bits: int) -> bool:
        """Return whether an activation's signed codes are written as unsigned ones.

        Args:
            bits: of the integers that hold the codes.

        >>> power = QuantizationSpec(scale_type="poweroftwo")
        >>> CONVENTIONS["npu"].makes_unsigned(power, 8), EXACT.makes_unsigned(power, 8)
        (False, True)
        """
        if self.keeps_powers_signed and spec.scale_type == "poweroftwo":
            return False
        return bits in self.unsigned_bits


EXACT = Conventions()
"""The default profile."""

CONVENTIONS: dict[str, Conventions] = {
    "exact": EXACT,
    "fast": Conventions(rounds_half_even=True, is_packed=True, quantizes_gates=True),
    "tuned": Conventions(
        rounds_half_even=True, quantizes_gates=True, decodes_ahead=True, is_tuned=True
    ),
    "tensorrt": Conventions(
        activations=Limits(
            "TensorRT",
            "start from the preset tensorrt_int8",
            (
                INTEGERS,
                STATIC_RANGES,
                of_bits((8,)),
                SIGNED_CODES,
                WHOLE_TYPES,
                rounded_by(("half_even",)),
            ),
        ),
        weights=Limits("TensorRT", _FLOAT, _INT8_WEIGHTS),
        unsigned_bits=(),
        biases=BiasForm.FLOAT,
        linear=LinearForm.ADDED,
        is_for_kernels=False,
    ),
    "npu": Conventions(
        activations=Limits(
            "an NPU",
            "start from the preset npu_int8",
            (
                INTEGERS,
                STATIC_RANGES,
                of_bits((8, 16)),
                POWERS_OR_ZERO_POINTS,
                rounded_by(NEAREST),
            ),
        ),
        weights=Limits("an NPU", _FLOAT, _INT8_WEIGHTS),
        unsigned_bits=(8, 16),
        keeps_powers_signed=True,
        biases=BiasForm.PRODUCTS,
        linear=LinearForm.GEMM,
        rounds_half_even=True,
        is_for_kernels=False,
        wraps_operators=True,
    ),
}
"""By the values of `--onnx_profile`."""
