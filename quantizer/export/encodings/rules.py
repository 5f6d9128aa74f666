"""What encodings cannot hold of a plan, and what to change."""

from collections.abc import Iterable, Iterator

from onnx import ModelProto

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.errors import UsageError
from quantizer.export.encodings.document import ENCODINGS_VERSIONS, WITH_AXES, TensorEncoding
from quantizer.export.exporter import Reason, Refusal
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.rounding import NEAREST
from quantizer.plan.model import TensorSpecs

ENCODED_BITS = (4, 8, 16)
"""The widths of codes that encodings have."""
_TARGET_HELP = "or use <--deploy onnx or pt2>"
# The dimensions of a linear layer's weight, the only one that may have groups.
_LINEAR_DIMENSIONS = 2


def encoding_refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield what encodings cannot hold. Biases stay floats and always fit."""
    for (layer, role), spec in specs.items():
        node = graph.by_name[layer]
        reason: Reason | None = None
        if not is_parameter(role):
            reason = _activation_reason(spec)
        elif base_role(role) == "weights":
            reason = _weight_reason(spec, node, role, graph)
        if reason is not None:
            yield Refusal(*reason, layer, role)


def encoded_bits(spec: QuantizationSpec) -> int:
    """Return the width of the encoding that holds a weight's codes.

    >>> encoded_bits(QuantizationSpec(bit_width=3)), encoded_bits(QuantizationSpec(bit_width=7))
    (4, 8)
    """
    return next(bits for bits in ENCODED_BITS if spec.bit_width <= bits)


def _activation_reason(spec: QuantizationSpec) -> Reason | None:
    """Return why encodings lack the spec of an activation, with a remedy; None if not."""
    if spec.is_dynamic:
        return (
            "has a dynamic range, and encodings have fixed ones",
            f"set is_dynamic to false there, {_TARGET_HELP}",
        )
    if spec.dtype != "int":
        return (
            f"is {spec.dtype}, and encodings have integers",
            f'set dtype to "int" there, {_TARGET_HELP}',
        )
    if spec.qscheme != "per_tensor":
        return (
            f"has scales {_along(spec)}, and encodings have one for each activation",
            f"set its qscheme to per_tensor, {_TARGET_HELP}",
        )
    if spec.bit_width not in ENCODED_BITS:
        return (
            f"has {spec.bit_width} bits, and encodings have 4, 8 or 16",
            "set its bit_width to one of these",
        )
    if spec.has_signed_codes and spec.narrow_range:
        return (
            "has a narrow range, and encodings use all codes of a width",
            "set narrow_range to false there",
        )
    if spec.round_mode not in NEAREST:
        return (
            f"is rounded by {spec.round_mode}, and readers of encodings round to the nearest",
            "set its round_mode to half_even or half_up",
        )
    return None


def _weight_reason(
    spec: QuantizationSpec, node: Node, role: str, graph: Graph
) -> Reason | None:
    if role != "weights":
        return (
            "belongs to a recurrent layer, whose weights ONNX arranges in its own way",
            f"leave the layer in float, {_TARGET_HELP}",
        )
    if spec.dtype != "int":
        return (
            f"is {spec.dtype}, and encodings have integers",
            f'set dtype to "int" there, {_TARGET_HELP}',
        )
    if spec.bit_width > ENCODED_BITS[-1]:
        return (
            f"has {spec.bit_width} bits, and encodings have {ENCODED_BITS[-1]} at most",
            "set its bit_width to 16 or less",
        )
    if spec.qscheme == "per_group":
        return _group_reason(spec, graph.weight(node).shape)
    if spec.group_size is not None:
        return (
            "has scales along two axes, as groups of a transposed convolution and experts have",
            f"leave it in float, or set qscheme to per_tensor there, {_TARGET_HELP}",
        )
    return None


def _group_reason(spec: QuantizationSpec, shape: tuple[int, ...]) -> Reason | None:
    """Return why the blocks of encodings are not the groups of a weight."""
    remedy = f"set its qscheme to per_channel, {_TARGET_HELP}"
    if len(shape) != _LINEAR_DIMENSIONS or spec.ch_axis is None:
        return "has groups, which encodings have for linear layers only", remedy
    length = shape[spec.ch_axis]
    group_size = spec.group_size
    if group_size is None or group_size == -1:
        return None
    if length % group_size:
        return (
            f"has groups of {group_size}, which do not divide its {length} values",
            "choose a group_size that divides them",
        )
    return None


def _along(spec: QuantizationSpec) -> str:
    words = {"per_channel": "per channel", "per_group": "per group", "per_token": "per token"}
    return words[spec.qscheme]


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
