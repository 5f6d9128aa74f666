"""The conventions of each value of `--onnx_profile`: a row for each. The passes read the rows,
and no pass asks which profile it is. The integer types of ONNX, and which one holds codes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import onnx_ir as ir
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.export.arithmetic import BiasForm, SumBias, is_multiplied, layer_input_spec
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
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.rounding import NEAREST
from quantizer.plan.model import Key

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
        keeps_integers: whether some activations stay quantized then, even if a file in float is
            the fastest.
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
    keeps_integers: bool = False
    wraps_operators: bool = False


EXACT = Conventions()
"""The default profile."""
_TUNED = Conventions(
    rounds_half_even=True, quantizes_gates=True, decodes_ahead=True, is_tuned=True
)

CONVENTIONS: dict[str, Conventions] = {
    "exact": EXACT,
    "fast": Conventions(rounds_half_even=True, is_packed=True, quantizes_gates=True),
    "tuned": _TUNED,
    "mixed": replace(_TUNED, keeps_integers=True),
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


@dataclass(frozen=True)
class IntegerType:
    """An ONNX integer type of QuantizeLinear and DequantizeLinear since set `opset`."""

    data_type: ir.DataType
    low: int
    high: int
    opset: int = 13


INT8 = IntegerType(ir.DataType.INT8, -128, 127)
UINT8 = IntegerType(ir.DataType.UINT8, 0, 255)
# For DequantizeLinear only, with zero points of 0.
ONNX_INT32 = IntegerType(ir.DataType.INT32, -(1 << 31), (1 << 31) - 1)
# The narrowest first.
_INT16 = IntegerType(ir.DataType.INT16, -(1 << 15), (1 << 15) - 1, 21)
_UINT16 = IntegerType(ir.DataType.UINT16, 0, (1 << 16) - 1, 21)
_INTEGER_TYPES = (
    IntegerType(ir.DataType.INT4, -8, 7, 21),
    IntegerType(ir.DataType.UINT4, 0, 15, 21),
    INT8,
    UINT8,
    _INT16,
    _UINT16,
)
# The signed types of activations, by their unsigned ones and widths.
_UNSIGNED_TYPES = {INT8: (UINT8, 8), _INT16: (_UINT16, 16)}
EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
OPSETS = range(18, 24)
"""The operator sets that torch.onnx writes."""


def weight_type(spec: QuantizationSpec, opset: int) -> IntegerType | None:
    """Return the narrowest type for the codes of a weight at this operator set, if any.

    >>> weight_type(QuantizationSpec(bit_width=3), 21).high
    7
    >>> weight_type(QuantizationSpec(signed=False), 21).high
    255
    """
    return _narrowest(_INTEGER_TYPES, spec, opset)


def activation_type(
    spec: QuantizationSpec, opset: int, conventions: Conventions = EXACT
) -> tuple[IntegerType, int] | None:
    """Return the type for the codes of an activation, if any, and the offset to add to codes.

    Codes take at least 8 bits, as ONNX Runtime's optimizer drops a ReLU before 4-bit types
    with any zero point. UINT8 with an offset of 128 holds signed codes, unless the conventions
    are others: ONNX Runtime has no convolutions of INT8 activations on x64. From operator set
    21 on it also cannot move their quantization past a reshape.

    >>> activation_type(QuantizationSpec(), 20)[1]
    128
    >>> activation_type(QuantizationSpec(signed=False), 20)[1]
    0
    >>> power = QuantizationSpec(scale_type="poweroftwo")
    >>> activation_type(power, 20)[1], activation_type(power, 20, CONVENTIONS["npu"])[1]
    (128, 0)
    """
    is_signed = spec.quant_min < 0
    candidates = [
        kind for kind in _INTEGER_TYPES if kind.high > 15 and (kind.low < 0) == is_signed
    ]
    kind = _narrowest(candidates, spec, opset)
    if kind is None:
        return None
    if kind in _UNSIGNED_TYPES:
        unsigned, bits = _UNSIGNED_TYPES[kind]
        is_kept = conventions.keeps_powers_signed and spec.scale_type == "poweroftwo"
        if bits in conventions.unsigned_bits and not is_kept:
            return unsigned, unsigned.low - kind.low
    return kind, 0


def _narrowest(
    candidates: Sequence[IntegerType], spec: QuantizationSpec, opset: int
) -> IntegerType | None:
    known = [kind for kind in candidates if kind.opset <= opset]
    holding = (
        kind for kind in known if kind.low <= spec.quant_min <= spec.quant_max <= kind.high
    )
    return next(holding, None)


def stored_tensor(name: str, values: Tensor, data_type: ir.DataType) -> ir.TensorProtocol:
    """Return values as a tensor of an ONNX type, which holds them."""
    if values.is_floating_point():
        values = values.detach().float()
    array = values.contiguous().numpy().astype(data_type.numpy(), copy=False)
    return ir.Tensor(array, dtype=data_type, name=name)


MARK_DOMAIN = "quantizer"
MULTIPLYING = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators for which engines have kernels of integers."""
RECURRENT = ("GRU", "LSTM", "RNN")
"""Operators with matrix products inside."""
PRODUCTS = (*MULTIPLYING, *RECURRENT, "Einsum", "Attention")
"""All operators that convolve or multiply matrices."""
NUMBERED = "#"
"""Between a layer's name and the number of its product."""
INSIDE = "#inside"
"""After a layer's name, for a product that is a step on the way to what the layer makes."""
Quantizations = Sequence[tuple[Key, QuantizedTensor]]
"""What is quantized; a mark stands for one by its index."""


@dataclass(frozen=True)
class Lowering:
    """What the passes know of the network.

    Attributes:
        quantizations: by the indices of marks.
        biases: of the layers that add theirs to sums of integers.
        float_layers: those whose biases do not fit sums of integers.
        conventions: those of the profile.
        left_out: quantizations of activations that stay in float, although they are marked.
    """

    network: Network
    quantizations: Quantizations
    opset: int
    biases: Mapping[str, SumBias]
    float_layers: Collection[str]
    conventions: Conventions = EXACT
    left_out: Collection[Key] = ()

    @cached_property
    def specs(self) -> dict[Key, QuantizationSpec]:
        """Return the specs of all quantizations that are not left out."""
        return {
            key: tensor.spec for key, tensor in self.quantizations if key not in self.left_out
        }

    def has_float_input(self, layer: str) -> bool:
        """Return whether the input of a layer is not quantized."""
        graph = self.network.graph
        return layer_input_spec(layer, graph, self.specs) is None

    def decodes_ahead(self, layer: str, weights: QuantizedTensor) -> bool:
        """Return whether the weights of a product become floats when the file is loaded.

        Weights in groups do not: ONNX Runtime has kernels for them.
        """
        is_product = is_multiplied(self.network.graph.by_name[layer])
        is_decoded = self.conventions.decodes_ahead and weights.spec.qscheme != "per_group"
        return is_product and is_decoded and self.has_float_input(layer)

    def marked(self, mark: ir.Node) -> tuple[Key, QuantizedTensor]:
        """Return the quantization that a mark stands for."""
        return self.quantizations[mark.attributes["index"].as_int()]

    def weight_of(self, value: ir.Value | None) -> QuantizedTensor | None:
        """Return the quantized weight if a value is its mark's."""
        mark = None if value is None else value.producer()
        if mark is None or not is_mark(mark):
            return None
        (_, role), tensor = self.marked(mark)
        return tensor if is_parameter(role) else None


def is_mark(node: ir.Node) -> bool:
    """Return whether a node is a mark."""
    return node.domain == MARK_DOMAIN


def marks_of(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the marks of a graph."""
    for node in list(graph):
        if is_mark(node):
            yield node
