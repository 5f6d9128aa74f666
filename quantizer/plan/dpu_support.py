"""For every layer whether the DPU can run it, and why not. Reads graph and plan; needs no data
and no scales.

What a compiler decides from a whole network (memory, scheduling) is not seen here.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from quantizer.config.model import QuantizationSpec
from quantizer.graph.axis_rules import ALIKE, RESHAPED, SAME
from quantizer.graph.ir import Graph, Node
from quantizer.graph.targets import pair
from quantizer.plan.dpu_limits import FUSED, LIMITS, OPERATORS, PYTORCH, Geometry
from quantizer.plan.groups import EVERY_JOIN, Layout, layout, quantization_point
from quantizer.plan.model import Plan

RESTRICTIONS = (
    "the DPU's restrictions on a configuration: 8 bits, symmetric, one power-of-two scale"
)
# They say where quantization begins and ends, and compute nothing
STUBS = ("quant_stub", "dequant_stub")


@dataclass(frozen=True)
class Verdict:
    """`device` is "DPU", "CPU", or "" for what computes nothing; `engine` what runs it, `why`
    and `source` why not.
    """

    device: str
    engine: str = ""
    why: str = ""
    source: str = ""

    def to_json(self) -> dict[str, str]:
        """The fields that say something."""
        return {key: value for key, value in asdict(self).items() if value}


def _refused(why: str, source: str = PYTORCH) -> Verdict:
    return Verdict("CPU", why=why, source=source)


def verdicts(plan: Plan) -> dict[str, Verdict]:
    """Each layer's verdict by name, in execution order."""
    where, found = layout(plan.graph, EVERY_JOIN), dict[str, Verdict]()
    for node in plan.graph.nodes:
        verdict = _verdict(plan.graph, node, found)
        if verdict.device == "DPU" and (why := _unquantized(plan, where, node)):
            verdict = _refused(why, RESTRICTIONS)
        found[node.name] = verdict
    return found


def subgraphs(graph: Graph, found: Mapping[str, Verdict]) -> int:
    """In how many pieces the DPU runs the network: layers that feed each other without the CPU
    between.
    """
    stage: dict[str, int] = {}
    piece: dict[str, str] = {}
    for node in graph.nodes:
        device = found[node.name].device
        read = [name for name in node.refs() if found[name].device]
        stage[node.name] = max(
            (stage[name] + (found[name].device != device) for name in read), default=0
        )
        if device == "DPU":
            piece[node.name] = node.name
            joined = {
                piece[n]
                for n in read
                if found[n].device == "DPU" and stage[n] == stage[node.name]
            }
            piece = {
                name: node.name if owner in joined else owner for name, owner in piece.items()
            }
    return len(set(piece.values()))


def _verdict(graph: Graph, node: Node, found: Mapping[str, Verdict]) -> Verdict:
    """What the operator and its shape say."""
    # Results
    several = node.dtype is None and any(graph.by_name[name].is_float for name in node.refs())
    if node.row.kind == "structural" or node.op in STUBS or not (node.is_float or several):
        return Verdict("")
    # Values stay as they lie in memory
    in_order = node.row.only_moves and node.row.axes in (SAME, RESHAPED)
    if node.op == "getitem" or (
        in_order and node.dtype == graph.by_name[next(node.refs())].dtype
    ):
        source = found[next(node.refs())]
        return source if source.device != "CPU" else _refused("it moves what the CPU makes")
    op = _activation(node)
    if op in FUSED["conv2d"]:
        return _fused(graph, node, op, found)
    rule = _RULES.get(node.op)
    return rule(graph, node) if rule else _refused(f"the DPU has no {node.op}")


def _within_limits(engine: str, geometry: Geometry) -> Verdict:
    """The first limit that a geometry breaks."""
    for limit in LIMITS:
        if engine in limit.engines and not limit.fits(geometry):
            return _refused(limit.words.format(g=geometry), limit.source)
    return Verdict("DPU", engine)


def _fused(graph: Graph, node: Node, op: str, found: Mapping[str, Verdict]) -> Verdict:
    """An activation runs with the layer whose output it alone reads."""
    producer = next(node.refs())
    engine = found[producer].engine
    if graph.consumers[producer] != (node.name,) and node.row.kind == "fusable":
        return _refused(f"{producer} has other readers, so {op} cannot be part of it")
    if _activation(graph.by_name[producer]) in FUSED["conv2d"]:
        return _refused(f"{producer} is an activation already, and an engine applies one")
    if op in FUSED.get(engine, ()):
        return Verdict("DPU", engine)
    return _refused(
        f"{op} runs as part of another layer, and {engine or 'what the CPU runs'} has none",
        OPERATORS,
    )


def _convolution(graph: Graph, node: Node) -> Verdict:
    shape, attrs = graph.by_name[next(node.refs())].shape, node.attrs
    if shape is None or len(shape) != 4 or "weight" not in node.params:
        return _refused(
            "it is not a convolution of [b, channels, height, width] with a weight of its own"
        )
    weight, transposed = graph.weight(node).shape, node.row.transposed
    groups = attrs.get("groups", 1)
    channels = (
        (weight[0], weight[1] * groups) if transposed else (weight[1] * groups, weight[0])
    )
    if groups not in (1, channels[0]):
        return _refused(f"it has {groups} groups, and the DPU has 1 or one per input channel")
    if transposed and max(pair(attrs.get("output_padding", 0))):
        return _refused("its output_padding is not zero")
    padding, dilation = attrs.get("padding", 0), pair(attrs.get("dilation", 1))
    if isinstance(padding, str):
        padding = [(k - 1) * d // 2 for k, d in zip(weight[2:], dilation, strict=True)]
    kernel = weight[2], weight[3]
    geometry = Geometry(
        kernel, pair(attrs.get("stride", 1)), pair(padding), dilation, *channels
    )
    depthwise = "depthwise-" if groups > 1 else ""
    return _within_limits(f"{depthwise}{'transposed-' if transposed else ''}conv2d", geometry)


def _linear(graph: Graph, node: Node) -> Verdict:
    """A convolution whose kernel is the whole map that was flattened."""
    if "weight" not in node.params or node.shape is None or len(node.shape) != 2:
        return _refused("it is not a linear layer of [b, features] with a weight of its own")
    out, features = graph.weight(node).shape
    source = graph.by_name[next(node.refs())]
    before = graph.by_name[next(source.refs())].shape if source.row.axes is RESHAPED else None
    if before is not None and len(before) == 4 and before[1] and before[2] and before[3]:
        return _within_limits(
            "conv2d", Geometry((before[2], before[3]), in_channels=before[1], out_channels=out)
        )
    return _within_limits("conv2d", Geometry(in_channels=features, out_channels=out))


def _pooling(graph: Graph, node: Node) -> Verdict:
    attrs, shape = node.attrs, node.shape
    if node.op != "max_pool2d" and node.target != "dpu.avg_pool2d":
        return _refused(
            "it is not an average over windows of one fixed size in height and width"
        )
    kernel, channels = pair(attrs["kernel_size"]), (shape or (1, 1))[1] or 1
    if max(pair(attrs.get("dilation", 1))) > 1:
        return _refused("its window is dilated")
    geometry = Geometry(
        kernel,
        pair(attrs.get("stride") or kernel),
        pair(attrs.get("padding") or 0),
        (1, 1),
        channels,
    )
    return _within_limits(
        "max-pooling" if node.op == "max_pool2d" else "average-pooling", geometry
    )


def _elementwise(graph: Graph, node: Node) -> Verdict:
    shapes = {graph.by_name[name].shape for name in node.refs()}
    if len(shapes) > 1:
        return _refused("its operands differ in shape")
    if len(node.input_roles()) < 2 and node.row.axes is ALIKE:
        return _refused("it adds a constant")
    channels = (node.shape or (1, 1))[1:2]
    return _within_limits("eltwise", Geometry(in_channels=channels[0] or 1 if channels else 1))


def _join(graph: Graph, node: Node) -> Verdict:
    along = int(node.attrs.get("dim", 0)) % max(node.rank, 1)
    return (
        Verdict("DPU", "concat")
        if node.op == "cat" and along == 1
        else _refused("it does not join channels")
    )


def _pad(graph: Graph, node: Node) -> Verdict:
    constant = node.attrs.get("mode", "constant") == "constant" and not node.attrs.get("value")
    return (
        Verdict("DPU", "pad")
        if constant
        else _refused("it pads with something else than zeros")
    )


def _nearest(graph: Graph, node: Node) -> Verdict:
    before, after = graph.by_name[next(node.refs())].shape, node.shape
    whole = (
        before
        and after
        and all(a and b and b % a == 0 for a, b in zip(before[2:], after[2:], strict=True))
    )
    return (
        Verdict("DPU", "resize") if whole else _refused("it does not enlarge by whole numbers")
    )


def _slice(graph: Graph, node: Node) -> Verdict:
    dim = int(node.attrs.get("dim", 0))
    plain = dim > 1 or (int(node.attrs.get("step", 1)) == 1 and dim == 1)
    why = "it slices the batch, or channels in steps"
    return Verdict("DPU", "strided-slice") if plain else _refused(why, OPERATORS)


def _activation(node: Node) -> str:
    """The operator; a Hardtanh or clamp from 0 to 6 is a ReLU6."""
    low, high = (node.attrs.get(f"{end}_val", node.attrs.get(end)) for end in ("min", "max"))
    return "relu6" if node.op in ("hardtanh", "clamp") and (low, high) == (0, 6) else node.op


def _unquantized(plan: Plan, where: Layout, node: Node) -> str:
    """What is missing for the layer to run in 8-bit integers."""
    tensors = plan.of_layer(node.name)
    for role, tensor in tensors.items():
        if why := _unfit(tensor.spec):
            return f"its {role} {'have' if role.startswith('weights') else 'has'} {why}"
    if node.row.weight and "weights" not in tensors:
        return "its weights are not quantized"
    for name in [*node.refs(), node.name]:
        point = quantization_point(plan.graph, where, name)
        quantized = point and any(
            (point, role) in plan.tensors for role in ("activation", "input")
        )
        if plan.graph.by_name[name].is_float and not quantized:
            return f"{'its output' if name == node.name else name} is not quantized"
    return ""


def _unfit(spec: QuantizationSpec) -> str:
    """Why the DPU has no such codes."""
    if spec.dtype != "int" or spec.bit_width != 8:
        return f"{spec.bit_width} bits" if spec.dtype == "int" else f"the datatype {spec.dtype}"
    if not (spec.symmetric and spec.signed):
        return "codes that are not signed and symmetric"
    if spec.is_dynamic:
        return "a dynamic range"
    return (
        ""
        if spec.scale_type == "poweroftwo" and spec.ch_axis is None
        else "no single power-of-two scale"
    )


_RULES: dict[str, Callable[[Graph, Node], Verdict]] = {
    "conv2d": _convolution,
    "conv_transpose2d": _convolution,
    "linear": _linear,
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "mean"), _pooling),
    **dict.fromkeys(("add", "mul"), _elementwise),
    "cat": _join,
    "stack": _join,
    "pad": _pad,
    "upsample_nearest": _nearest,
    "slice": _slice,
}
