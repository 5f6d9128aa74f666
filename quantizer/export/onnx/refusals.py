"""Lists what ONNX, ONNX Runtime or the engine of a profile have against a network, before
anything is calibrated.
"""

from collections.abc import Iterable, Iterator

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.config.wording import counted
from quantizer.export.arithmetic import is_multiplied, layer_input_spec
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.limits import Limits
from quantizer.export.onnx.activations import activation_reasons
from quantizer.export.onnx.decompositions import complex_refusals, lacks_product
from quantizer.export.onnx.lowering import OPSETS, Conventions
from quantizer.export.onnx.translation import reason_of, translatable, translate_program
from quantizer.export.programs.program import lone_programs
from quantizer.graph.ir import Graph, Node
from quantizer.graph.structure.transformer_parts import cached_values
from quantizer.plan.model import TensorSpecs

_DOUBTFUL = ("histc", "median", "prod", "searchsorted", "sort")
"""Operators in the table of operators of which torch.onnx knows only some calls."""
_UNKNOWN_HELP = "keep that part outside the quantized model, or use <--deploy pt2>"


def graph_refusals(graph: Graph, opset: int) -> Iterator[Refusal]:
    """Yield what ONNX cannot express of a network in float."""
    if opset not in OPSETS:
        why = f"writes operator sets {OPSETS.start} to {OPSETS[-1]}, not {opset}"
        yield Refusal(why, "set onnx_opset_version to one of these, or to -1")
    else:
        yield from _untranslatable_operators(graph, opset)
    yield from complex_refusals(graph)
    for node in graph.nodes:
        if _pools_any_size(graph, node):
            yield Refusal(
                "pools a map of any size to a constant one, for which ONNX has no operator",
                "pool to a size of 1, leave <--dynamic> out, or use <--deploy pt2>",
                node.name,
            )
        if lacks_product(node):
            yield Refusal(
                "has a number of groups that follows the batch; ONNX has a constant there",
                "write it as a product of matrices (torch.bmm), or use <--deploy pt2>",
                node.name,
            )
        if "weight_hr_l0" in node.params:
            why = "is an LSTM with proj_size, which ONNX's LSTM operator lacks"
            remedy = (
                "leave proj_size out and put a Linear layer behind it, or use <--deploy pt2>"
            )
            yield Refusal(why, remedy, node.name)


def _pools_any_size(graph: Graph, node: Node) -> bool:
    """Return whether a pooling gives several values along an axis whose size is open."""
    if not node.target.startswith("aten.adaptive_") or node.shape is None:
        return False
    source = graph.source(node)
    if source is None:
        return False
    for axis in set(source.open_axes).difference(node.open_axes):
        size = node.shape[axis]
        if size is not None and size > 1:
            return True
    return False


def _untranslatable_operators(graph: Graph, opset: int) -> Iterator[Refusal]:
    """Yield operators that torch.onnx has no form for, each with its first layer.

    Each rare operator is translated alone, which takes a tenth of a second. A plan and an
    export ask of the same graph.
    """
    key = f"untranslatable in operator set {opset}"
    refusals = graph.derived.get(key)
    if refusals is None:
        refusals = []
        for node, program in lone_programs(graph, _DOUBTFUL):
            try:
                translate_program(translatable(program), ([], []), opset)
            except torch.onnx.OnnxExporterError as error:
                reason = reason_of(error)
                why = f"computes {node.op}, for which torch.onnx has no form: {reason}"
                refusals.append(Refusal(why, _UNKNOWN_HELP, node.name))
        graph.derived[key] = refusals
    yield from refusals


def tensor_refusals(
    conventions: Conventions, graph: Graph, specs: TensorSpecs, opset: int
) -> Iterator[Refusal]:
    """Yield everything that ONNX or the engine does not take, so that one reading is enough.

    Weights that no product multiplies are written as floats, and so are biases of other
    widths. Therefore they are never refused.
    """
    for (layer, role), spec in specs.items():
        node = graph.by_name[layer]
        reasons: list[Reason] = []
        if not is_parameter(role):
            reasons += activation_reasons(spec, node.dtype, opset, conventions)
            if conventions.activations is not None and spec.dtype != "float32":
                reasons += conventions.activations.reasons(spec)
        elif conventions.weights is not None and role == "weights" and is_multiplied(node):
            input_spec = layer_input_spec(layer, graph, specs)
            reasons += _weight_reasons(conventions.weights, node, spec, input_spec)
        for reason in reasons:
            yield Refusal(*reason, layer, role)


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


def _weight_reasons(
    limits: Limits, node: Node, spec: QuantizationSpec, input_spec: QuantizationSpec | None
) -> Iterator[Reason]:
    """Yield why an engine cannot hold the spec of a weight, each with a remedy."""
    yield from limits.reasons(spec)
    if spec.dtype != "int":
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
    if conventions.activations is None:
        return ()
    engine = conventions.activations.engine
    remarks = [
        f"the file is for {engine}, which did not run it. ONNX Runtime did, "
        "with session.disable_quant_qdq 1, which leaves its own kernels of integers out"
    ]
    activations = [spec for (_, role), spec in specs.items() if not is_parameter(role)]
    integers = [spec for spec in activations if spec.dtype == "int"]
    modes = {spec.round_mode for spec in integers} - {"half_even"}
    narrow = sum(spec.narrow_range for spec in integers)
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
