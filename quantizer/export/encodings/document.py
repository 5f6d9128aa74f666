"""The JSON of encodings that AIMET writes and QNN's converters read, in two versions, and what
they cannot hold of a plan.

Source: aimet-onnx 2.42, the classes of its module `_encoding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

import quantizer
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.errors import UsageError
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.limits import (
    INTEGERS,
    ONE_SCALE,
    STATIC_RANGES,
    WHOLE_TYPES,
    Limits,
    of_bits,
    rounded_by,
)
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.rounding import NEAREST
from quantizer.plan.model import TensorSpecs

ENCODINGS_VERSIONS = ("1.0.0", "2.0.0")
"""What `--encodings_version` may be, the default first."""
WITH_AXES = "2.0.0"
"""The version whose entries state their axis."""
_PER_TENSOR = "PER_TENSOR"
_PER_CHANNEL = "PER_CHANNEL"
_PER_BLOCK = "PER_BLOCK"


@dataclass(frozen=True)
class TensorEncoding:
    """How one tensor of an ONNX file is quantized.

    The value of a code is scale * (code - zero_point). Codes are integers of `bits` bits.

    Attributes:
        name: of the tensor, or of the initializer.
        is_signed: whether codes are on both sides of zero. Encodings call that symmetric.
        scale: float64, (), [channels], or the blocked shape that ONNX's DequantizeLinear has.
        zero_point: int64, in the same shape.
        axis: of the channels, or the one that blocks run along.
        block_size: of the blocks; None without blocks.
        is_parameter: whether it is an initializer.
    """

    name: str
    bits: int
    is_signed: bool
    scale: NDArray[np.float64]
    zero_point: NDArray[np.int64]
    axis: int | None = None
    block_size: int | None = None
    is_parameter: bool = False

    @property
    def lowest(self) -> int:
        """Return the smallest code."""
        return -(1 << (self.bits - 1)) if self.is_signed else 0

    @property
    def highest(self) -> int:
        """Return the largest code."""
        return self.lowest + (1 << self.bits) - 1

    def has_same_codes(self, other: TensorEncoding) -> bool:
        """Return whether both give a tensor the same codes with the same values."""
        same_range = (self.bits, self.is_signed) == (other.bits, other.is_signed)
        same_scale = np.array_equal(self.scale, other.scale)
        return same_range and same_scale and np.array_equal(self.zero_point, other.zero_point)


def encodings_document(encodings: Sequence[TensorEncoding], version: str) -> JsonObject:
    """Return the content of the file.

    Args:
        encodings: in the order of the file.
        version: one of `ENCODINGS_VERSIONS`.
    """
    producer = {"package": "quantizer", "version": quantizer.__version__}
    document: JsonObject = {"producer": producer, "version": version}
    if version == WITH_AXES:
        document["encodings"] = [_with_axis(encoding) for encoding in encodings]
        return document
    activations: list[JsonObject] = []
    parameters: list[JsonObject] = []
    for encoding in encodings:
        section = parameters if encoding.is_parameter else activations
        section.append(_with_offset(encoding))
    document["activation_encodings"] = activations
    document["param_encodings"] = parameters
    return document


def _with_axis(encoding: TensorEncoding) -> JsonObject:
    """Return an entry of version 2.0.0."""
    word = "int" if encoding.is_signed else "uint"
    entry: JsonObject = {
        "name": encoding.name,
        "output_dtype": f"{word}{encoding.bits}",
        "y_scale": encoding.scale.tolist(),
    }
    if encoding.zero_point.any():
        entry["y_zero_point"] = encoding.zero_point.tolist()
    if encoding.axis is not None:
        entry["axis"] = encoding.axis
    if encoding.block_size is not None:
        entry["block_size"] = encoding.block_size
    return entry


def _with_offset(encoding: TensorEncoding) -> JsonObject:
    """Return an entry of version 1.0.0.

    Its offset is that of unsigned codes, with the opposite sign of a zero point. Channels and
    blocks have no axis: readers know it from the operator.
    """
    kind = _PER_TENSOR
    scale = encoding.scale
    offset = encoding.lowest - encoding.zero_point
    if encoding.block_size is not None:
        kind = _PER_BLOCK
        if encoding.axis == 0:
            # The outputs come first, also for a weight [inputs, outputs].
            scale = scale.T
            offset = offset.T
    elif encoding.axis is not None:
        kind = _PER_CHANNEL
    entry: JsonObject = {
        "name": encoding.name,
        "dtype": "INT",
        "bw": encoding.bits,
        "is_sym": encoding.is_signed,
        "enc_type": kind,
        "scale": scale.flatten().tolist(),
        "offset": offset.flatten().tolist(),
    }
    if encoding.block_size is not None:
        entry["block_size"] = encoding.block_size
    return entry


def read_document(
    document: JsonMapping, shapes: dict[str, tuple[int, ...]], axes: dict[str, int]
) -> list[TensorEncoding]:
    """Return the encodings of a file, as its readers understand it.

    Args:
        document: the content of the file.
        shapes: of the initializers, by name.
        axes: of their channels, by name, as the operator that reads them has them.
    """
    if document["version"] == WITH_AXES:
        return [_read_with_axis(entry, shapes) for entry in document["encodings"]]
    encodings = [
        _read_with_offset(entry, (), 0, is_parameter=False)
        for entry in document["activation_encodings"]
    ]
    for entry in document["param_encodings"]:
        name = entry["name"]
        axis = axes.get(name, 0)
        encodings.append(_read_with_offset(entry, shapes[name], axis, is_parameter=True))
    return encodings


def _read_with_axis(entry: JsonMapping, shapes: dict[str, tuple[int, ...]]) -> TensorEncoding:
    word, _, bits = entry["output_dtype"].partition("int")
    scale = np.array(entry["y_scale"], np.float64)
    zero_point = np.array(entry.get("y_zero_point", np.zeros(scale.shape)), np.int64)
    return TensorEncoding(
        entry["name"],
        int(bits),
        is_signed=word != "u",
        scale=scale,
        zero_point=zero_point,
        axis=entry.get("axis"),
        block_size=entry.get("block_size"),
        is_parameter=entry["name"] in shapes,
    )


def _read_with_offset(
    entry: JsonMapping, shape: tuple[int, ...], axis: int, *, is_parameter: bool
) -> TensorEncoding:
    """Read an entry of a version with an offset for each scale.

    Args:
        entry: of one tensor.
        shape: of the tensor.
        axis: that of the channels.
        is_parameter: whether it is a weight or a bias.
    """
    scale = np.array(entry["scale"], np.float64)
    offset = np.array(entry["offset"], np.int64)
    block_size = entry.get("block_size")
    block_axis: int | None = axis
    if entry["enc_type"] == _PER_TENSOR:
        scale = scale.reshape(())
        offset = offset.reshape(())
        block_axis = None
    elif block_size is not None:
        blocks = (shape[axis], shape[1 - axis] // block_size)
        scale = scale.reshape(blocks)
        offset = offset.reshape(blocks)
        block_axis = 1 - axis
        if block_axis == 0:
            scale = scale.T
            offset = offset.T
    lowest = -(1 << (entry["bw"] - 1)) if entry["is_sym"] else 0
    return TensorEncoding(
        entry["name"],
        entry["bw"],
        is_signed=entry["is_sym"],
        scale=scale,
        zero_point=lowest - offset,
        axis=block_axis,
        block_size=block_size,
        is_parameter=is_parameter,
    )


ENCODED_BITS = (4, 8, 16)
"""The widths of codes that encodings have."""
_OTHER_TARGET = "use <--deploy onnx or pt2>"
_ACTIVATIONS = Limits(
    "an encoding",
    _OTHER_TARGET,
    (
        INTEGERS,
        STATIC_RANGES,
        ONE_SCALE,
        of_bits(ENCODED_BITS),
        WHOLE_TYPES,
        rounded_by(NEAREST),
    ),
)
_WEIGHTS = Limits(
    "an encoding",
    _OTHER_TARGET,
    (INTEGERS, STATIC_RANGES, of_bits(range(1, ENCODED_BITS[-1] + 1))),
)
# The dimensions of a linear layer's weight, the only one that may have groups.
_LINEAR_DIMENSIONS = 2


def encoding_refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield what encodings cannot hold. Biases stay floats and always fit."""
    for (layer, role), spec in specs.items():
        reasons: Iterable[Reason] = ()
        if not is_parameter(role):
            reasons = _ACTIVATIONS.reasons(spec)
        elif base_role(role) == "weights":
            reasons = _weight_reasons(spec, graph.by_name[layer], role, graph)
        for reason in reasons:
            yield Refusal(*reason, layer, role)


def encoded_bits(spec: QuantizationSpec) -> int:
    """Return the width of the encoding that holds a weight's codes.

    >>> encoded_bits(QuantizationSpec(bit_width=3)), encoded_bits(QuantizationSpec(bit_width=7))
    (4, 8)
    """
    return next(bits for bits in ENCODED_BITS if spec.bit_width <= bits)


def _weight_reasons(
    spec: QuantizationSpec, node: Node, role: str, graph: Graph
) -> Iterator[Reason]:
    """Yield why encodings lack the spec of a weight, each with a remedy."""
    if role != "weights":
        yield (
            "belongs to a recurrent layer, whose weights ONNX arranges in its own way",
            f"leave the layer in float, or {_OTHER_TARGET}",
        )
        return
    yield from _WEIGHTS.reasons(spec)
    if spec.dtype != "int":
        return
    if spec.qscheme == "per_group":
        yield from _group_reasons(spec, graph.weight(node).shape)
    elif spec.group_size is not None:
        yield (
            "has scales along two axes, as groups of a transposed convolution and experts have",
            "leave it in float, or set qscheme to per_tensor there, or " + _OTHER_TARGET,
        )


def _group_reasons(spec: QuantizationSpec, shape: tuple[int, ...]) -> Iterator[Reason]:
    """Yield why the blocks of encodings are not the groups of a weight."""
    if len(shape) != _LINEAR_DIMENSIONS or spec.ch_axis is None:
        yield (
            "has groups, which encodings have for linear layers only",
            f"set its qscheme to per_channel, or {_OTHER_TARGET}",
        )
    elif spec.group_size not in (None, -1) and shape[spec.ch_axis] % spec.group_size:
        yield (
            f"has groups of {spec.group_size}, which do not divide its {shape[spec.ch_axis]} "
            "values",
            "choose a group_size that divides them",
        )


def require_axes(encodings: Iterable[TensorEncoding], model: ModelProto, version: str) -> None:
    """Check that channels are along the axis that readers of version 1.0.0 assume.

    Raises:
        UsageError: they are along another one, which only version 2.0.0 can say.
    """
    if version != ENCODINGS_VERSIONS[0]:
        return
    axes = channel_axes(model)
    for encoding in encodings:
        assumed = axes.get(encoding.name)
        axis = encoding.axis
        if axis is None:
            continue
        if encoding.block_size is not None:
            axis = 1 - axis
        if axis != assumed:
            raise UsageError(
                f"<--deploy encodings>: {encoding.name} has scales along axis {axis}, and "
                f"version {version} has no place for an axis",
                help=f"<--encodings_version {WITH_AXES}> has one",
            )


def channel_axes(model: ModelProto) -> dict[str, int]:
    """Return the axis of output channels of each weight that a multiplication reads.

    Source: aimet-onnx 2.42, `QuantizationSimModel._get_quantization_axes`.
    """
    axes: dict[str, int] = {}
    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        weight = node.input[1] if len(node.input) > 1 else ""
        if weight not in ranks:
            continue
        if node.op_type == "Conv":
            axes[weight] = 0
        elif node.op_type == "ConvTranspose":
            axes[weight] = 1
        elif node.op_type == "Gemm":
            attributes = {entry.name: entry.i for entry in node.attribute}
            axes[weight] = 0 if attributes.get("transB") else 1
        elif node.op_type == "MatMul":
            axes[weight] = ranks[weight] - 1
    return axes
