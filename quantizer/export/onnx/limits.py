"""Lists what an engine's `Limits` have against a plan, tensor by tensor."""

from collections.abc import Iterable, Iterator

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.config.wording import counted
from quantizer.export.arithmetic.operands import is_multiplied, layer_input_spec
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.onnx.conventions import Conventions, Limits
from quantizer.graph.ir import Graph, Node
from quantizer.graph.structure.attention import cached_values
from quantizer.plan.model import TensorSpecs

_WEIGHT_BITS = 8
_FLOAT_HELP = "leave it float"


def limit_refusals(limits: Limits, graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield everything that an engine does not take, so that one reading is enough.

    Weights that no product multiplies are written as floats, and so are biases of other
    widths. Therefore they are never refused.
    """
    for (layer, role), spec in specs.items():
        node = graph.by_name[layer]
        if not is_parameter(role):
            reasons = _activation_reasons(limits, spec)
        elif role == "weights" and is_multiplied(node):
            input_spec = layer_input_spec(layer, graph, specs)
            reasons = _weight_reasons(limits, node, spec, input_spec)
        else:
            continue
        for why, remedy in reasons:
            yield Refusal(why, remedy, layer, role)


def float8_key_refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield the fp8 keys of attentions that are one operator in the graph.

    In a file, such keys are transposed after they are quantized. ONNX Runtime 1.31 transposes
    the codes instead, and has no Transpose for fp8.
    """
    for cached in cached_values(graph):
        spec = specs.get((cached.layer, cached.role))
        if spec is None or cached.part != "key" or not cached.is_fused:
            continue
        if spec.dtype.startswith("fp8") and not spec.is_dynamic:
            yield Refusal(
                f"is {spec.dtype} and is transposed, which ONNX Runtime cannot do",
                "set its dtype to int8, load the model with attn_implementation eager, or use "
                "<--deploy pt2>",
                cached.layer,
                cached.role,
            )


def _activation_reasons(limits: Limits, spec: QuantizationSpec) -> Iterator[Reason]:
    """Yield why an engine cannot hold the spec of an activation, each with a remedy."""
    if spec.dtype == "float32":
        return
    if spec.dtype != "int":
        yield (
            f"is {spec.dtype}; {limits.engine} is given integers",
            f"set its dtype to int8, or {_FLOAT_HELP}",
        )
        return
    if spec.is_dynamic:
        yield (
            f"has a dynamic range, which {limits.engine} lacks",
            "set is_dynamic to false there",
        )
    if spec.bit_width not in limits.bits:
        widths = " or ".join(str(bits) for bits in limits.bits)
        yield (
            f"has {spec.bit_width} bits; {limits.engine} takes {widths}",
            f"set its bit_width to {widths}",
        )
    if not limits.takes_zero_points and not spec.has_signed_codes:
        yield _sign_reason(limits)
    elif spec.scale_type == "poweroftwo" and not spec.symmetric:
        yield (
            f"has power-of-two scales and a zero point; {limits.engine} takes one of them",
            "set symmetry to true there, or scale_type to float",
        )
    if spec.narrow_range and not limits.takes_narrow:
        yield (
            f"has a narrow range, and {limits.engine} has codes down to -128",
            "set narrow_range to false there",
        )
    if spec.round_mode not in limits.roundings:
        yield (
            f"is rounded by {spec.round_mode}, and {limits.engine} rounds to the nearest "
            "integer",
            'set round_mode to "half_even" there',
        )


def _sign_reason(limits: Limits) -> Reason:
    return (
        f"is not int8 with the zero point 0, as {limits.engine} needs it",
        'set symmetry and signed to true there (in the hierarchical form dtype "int8" and '
        f"symmetric true), or start from the preset {limits.preset}",
    )


def _weight_reasons(
    limits: Limits, node: Node, spec: QuantizationSpec, input_spec: QuantizationSpec | None
) -> Iterator[Reason]:
    """Yield why an engine cannot hold the spec of a weight, each with a remedy."""
    if spec.dtype != "int" or spec.bit_width > _WEIGHT_BITS:
        kind = f"has {spec.bit_width} bits" if spec.dtype == "int" else f"is {spec.dtype}"
        yield f"{kind}; {limits.engine} takes int8", f"set it to int8, or {_FLOAT_HELP}"
        return
    if node.row.transposed and spec.group_size is not None:
        yield (
            "is of a transposed convolution with groups, and no axis of it is that of the "
            "outputs",
            "set per_channel to false there",
        )
    elif spec.qscheme == "per_group" or spec.group_size is not None:
        yield (
            f"has a scale for each group; {limits.engine} takes one scale, or one for each "
            "output",
            "set its qscheme to per_channel or per_tensor",
        )
    elif spec.ch_axis not in (None, int(node.row.transposed)):
        yield (
            f"has scales along axis {spec.ch_axis}, which is not that of the outputs",
            f"set its ch_axis to {int(node.row.transposed)}",
        )
    if not spec.has_signed_codes:
        yield _sign_reason(limits)
    if input_spec is None:
        yield (
            f"meets a float input; {limits.engine} multiplies integers if both are quantized",
            "quantize the layer's input, too, or leave the weights float",
        )


def wide_bias_refusals(layers: Iterable[str]) -> Iterator[Refusal]:
    """Yield a refusal for each layer whose bias no int32 holds in steps of its sums."""
    for layer in layers:
        yield Refusal(
            "does not fit int32 in steps of the input's scale times the weights' scale",
            "set per_channel to true for the weights there, or bit_width to 8 for the input",
            layer,
            "bias",
        )


def profile_remarks(conventions: Conventions, specs: TensorSpecs) -> tuple[str, ...]:
    """Return what the file of an engine leaves out of the config, and how it was checked."""
    if conventions.limits is None:
        return ()
    remarks = [
        f"the file is for {conventions.limits.engine}, which did not run it. ONNX Runtime did, "
        "with session.disable_quant_qdq 1, which leaves its own kernels of integers out"
    ]
    modes: set[str] = set()
    narrow = 0
    for (_, role), spec in specs.items():
        if is_parameter(role) or spec.dtype != "int":
            continue
        narrow += int(spec.narrow_range)
        if spec.round_mode != "half_even":
            modes.add(spec.round_mode)
    if modes:
        remarks.append(
            "QuantizeLinear rounds half to even, and so did the test mode that the file was "
            f"compared with; the config says {', '.join(sorted(modes))}, which gives other "
            "codes at half-way points"
        )
    if narrow:
        remarks.append(
            f"{counted(narrow, 'activation')} with narrow_range may have the code below their "
            "smallest in the file: QuantizeLinear ends with its type"
        )
    return tuple(remarks)
