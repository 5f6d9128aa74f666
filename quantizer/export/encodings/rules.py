"""What encodings cannot hold of a plan, and what to change."""

from collections.abc import Iterable, Iterator

from onnx import ModelProto

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.errors import UsageError
from quantizer.export.encodings.document import ENCODINGS_VERSIONS, WITH_AXES, TensorEncoding
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
        for why, remedy in reasons:
            yield Refusal(why, remedy, layer, role)


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
