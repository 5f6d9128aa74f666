"""Decide for every layer whether the DPU can run it, and why not, from the graph and the plan.
Neither data nor scales are needed. Say before calibration if the DPU cannot run most of a
network.

What a compiler decides about a whole network (memory, scheduling) is not covered.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import QuantizationSpec
from quantizer.graph.channels.axis_rules import ALIKE, RESHAPED, SAME
from quantizer.graph.ir import Graph, Node
from quantizer.graph.structure.transformer_parts import cached_values
from quantizer.graph.targets import pair
from quantizer.plan.dpu_limits import (
    FUSED,
    LIMITS,
    OPERATOR_LIMITS,
    PYTORCH_OPERATORS,
    Geometry,
)
from quantizer.plan.groups import layout
from quantizer.plan.layout import EVERY_JOIN, Layout, quantization_point
from quantizer.plan.model import Plan
from quantizer.plugins import if_command

_RESTRICTIONS = (
    "the DPU's restrictions on a configuration: 8 bits, symmetric, one power-of-two scale"
)
# They mark where quantization begins and ends, and compute nothing
_STUBS = ("quant_stub", "dequant_stub")
_LOSES = (
    "; with one power-of-two scale for each tensor, a transformer encoder loses most of its "
    "accuracy"
)


@dataclass(frozen=True)
class Verdict:
    """The device that runs a layer.

    Attributes:
        device: "DPU", "CPU", or "" for a layer that computes nothing.
        engine: what runs the layer on the DPU.
        why, source: why the DPU cannot run it, and the document that says so.
    """

    device: str
    engine: str = ""
    why: str = ""
    source: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields that are not empty."""
        return {key: value for key, value in asdict(self).items() if value}


def _refused(why: str, source: str = PYTORCH_OPERATORS) -> Verdict:
    return Verdict("CPU", why=why, source=source)


def verdicts(plan: Plan) -> dict[str, Verdict]:
    """Return each layer's verdict by name, in execution order."""
    where = layout(plan.graph, EVERY_JOIN)
    by_name: dict[str, Verdict] = {}
    for node in plan.graph.nodes:
        verdict = _verdict(plan.graph, node, by_name)
        if verdict.device == "DPU":
            why = _unquantized(plan, where, node)
            if why:
                verdict = _refused(why, _RESTRICTIONS)
        by_name[node.name] = verdict
    return by_name


def subgraphs(graph: Graph, verdicts: Mapping[str, Verdict]) -> int:
    """Return in how many pieces the DPU runs the network. A piece consists of layers that feed
    each other without the CPU between them.
    """
    # How often the device changes on the way to a layer
    stages: dict[str, int] = {}
    pieces: dict[str, str] = {}
    for node in graph.nodes:
        device = verdicts[node.name].device
        sources = [name for name in node.refs() if verdicts[name].device]
        stage = 0
        for name in sources:
            is_change = verdicts[name].device != device
            stage = max(stage, stages[name] + is_change)
        stages[node.name] = stage
        if device != "DPU":
            continue
        pieces[node.name] = node.name
        joined: set[str] = set()
        for name in sources:
            if verdicts[name].device == "DPU" and stages[name] == stage:
                joined.add(pieces[name])
        for name, piece in pieces.items():
            if piece in joined:
                pieces[name] = node.name
    return len(set(pieces.values()))


def _verdict(graph: Graph, node: Node, verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict on a layer's operator and shape."""
    if node.row.kind == "structural" or node.op in _STUBS:
        return Verdict("")
    sources = [graph.by_name[name] for name in node.refs()]
    has_results = node.dtype is None and any(source.is_float for source in sources)
    if not node.is_float and not has_results:
        return Verdict("")
    if node.op == "getitem" or _stays_in_memory(node, sources):
        verdict = verdicts[sources[0].name]
        if verdict.device == "CPU":
            return _refused("it moves what the CPU makes")
        return verdict
    op = _activation(node)
    if op in FUSED["conv2d"]:
        return _fused(graph, node, op, verdicts)
    rule = _RULES.get(node.op)
    if rule is None:
        return _refused(f"the DPU has no {node.op}")
    return rule(graph, node)


def _stays_in_memory(node: Node, sources: list[Node]) -> bool:
    """Return whether the node leaves values where they are in memory."""
    if not node.row.only_moves or node.row.axes not in (SAME, RESHAPED):
        return False
    return node.dtype == sources[0].dtype


def _within_limits(engine: str, geometry: Geometry) -> Verdict:
    """Return a refusal with the first limit that a geometry breaks, or the engine."""
    for limit in LIMITS:
        if engine in limit.engines and not limit.fits(geometry):
            return _refused(limit.words.format(g=geometry), OPERATOR_LIMITS)
    return Verdict("DPU", engine)


def _fused(graph: Graph, node: Node, op: str, verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict on an activation, which runs with the layer before it."""
    producer = next(node.refs())
    engine = verdicts[producer].engine
    if graph.consumers[producer] != (node.name,) and node.row.kind == "fusable":
        return _refused(f"{producer} has other readers, so {op} cannot be part of it")
    if _activation(graph.by_name[producer]) in FUSED["conv2d"]:
        return _refused(f"{producer} is an activation already, and an engine applies one")
    if op in FUSED.get(engine, ()):
        return Verdict("DPU", engine)
    return _refused(
        f"{op} runs as part of another layer, and {engine or 'what the CPU runs'} has none",
        OPERATOR_LIMITS,
    )


def _convolution(graph: Graph, node: Node) -> Verdict:
    """Return whether the DPU can run a convolution of images."""
    attrs = node.attrs
    shape = graph.by_name[next(node.refs())].shape
    if shape is None or len(shape) != 4 or "weight" not in node.params:
        return _refused(
            "it is not a convolution of [b, channels, height, width] with a weight of its own"
        )
    weight = graph.weight(node).shape
    transposed = node.row.transposed
    groups = attrs.get("groups", 1)
    out_channels = weight[0]
    in_channels = weight[1] * groups
    if transposed:
        in_channels, out_channels = out_channels, in_channels
    if groups not in (1, in_channels):
        return _refused(f"it has {groups} groups, and the DPU has 1 or one per input channel")
    if transposed and max(pair(attrs.get("output_padding", 0))):
        return _refused("its output_padding is not zero")
    kernel = (weight[2], weight[3])
    dilation = pair(attrs.get("dilation", 1))
    padding = attrs.get("padding", 0)
    if isinstance(padding, str):
        sides = zip(kernel, dilation, strict=True)
        padding = [(size - 1) * step // 2 for size, step in sides]
    geometry = Geometry(
        kernel,
        stride=pair(attrs.get("stride", 1)),
        padding=pair(padding),
        dilation=dilation,
        in_channels=in_channels,
        out_channels=out_channels,
    )
    engine = "transposed-conv2d" if transposed else "conv2d"
    if groups > 1:
        engine = f"depthwise-{engine}"
    return _within_limits(engine, geometry)


def _linear(graph: Graph, node: Node) -> Verdict:
    """Return the verdict on a linear layer, which is a convolution. Its kernel is the whole map
    that was flattened.
    """
    if "weight" not in node.params or node.shape is None or len(node.shape) != 2:
        return _refused("it is not a linear layer of [b, features] with a weight of its own")
    out_channels, features = graph.weight(node).shape
    geometry = Geometry(in_channels=features, out_channels=out_channels)
    source = graph.by_name[next(node.refs())]
    if source.row.axes is RESHAPED:
        shape = graph.by_name[next(source.refs())].shape or ()
        if len(shape) == 4 and shape[1] and shape[2] and shape[3]:
            geometry = Geometry(
                (shape[2], shape[3]), in_channels=shape[1], out_channels=out_channels
            )
    return _within_limits("conv2d", geometry)


def _pooling(graph: Graph, node: Node) -> Verdict:
    attrs = node.attrs
    if node.op != "max_pool2d" and node.target != "dpu.avg_pool2d":
        return _refused(
            "it is not an average over windows of one fixed size in height and width"
        )
    if max(pair(attrs.get("dilation", 1))) > 1:
        return _refused("its window is dilated")
    kernel = pair(attrs["kernel_size"])
    geometry = Geometry(
        kernel,
        stride=pair(attrs.get("stride") or kernel),
        padding=pair(attrs.get("padding") or 0),
        in_channels=_channels(node),
    )
    engine = "max-pooling" if node.op == "max_pool2d" else "average-pooling"
    return _within_limits(engine, geometry)


def _channels(node: Node) -> int:
    """Return the size of dimension 1, or 1 if there is none or it is dynamic."""
    if node.shape is None or len(node.shape) < 2:
        return 1
    return node.shape[1] or 1


def _elementwise(graph: Graph, node: Node) -> Verdict:
    shapes = {graph.by_name[name].shape for name in node.refs()}
    if len(shapes) > 1:
        return _refused("its operands differ in shape")
    if len(node.input_roles()) < 2 and node.row.axes is ALIKE:
        return _refused("it adds a constant")
    return _within_limits("eltwise", Geometry(in_channels=_channels(node)))


def _join(graph: Graph, node: Node) -> Verdict:
    axis = int(node.attrs.get("dim", 0)) % max(node.rank, 1)
    if node.op != "cat" or axis != 1:
        return _refused("it does not join channels")
    return Verdict("DPU", "concat")


def _pad(graph: Graph, node: Node) -> Verdict:
    is_constant = node.attrs.get("mode", "constant") == "constant"
    if not is_constant or node.attrs.get("value"):
        return _refused("it pads with something else than zeros")
    return Verdict("DPU", "pad")


def _nearest(graph: Graph, node: Node) -> Verdict:
    refusal = _refused("it does not enlarge by whole numbers")
    before = graph.by_name[next(node.refs())].shape
    after = node.shape
    if not before or not after:
        return refusal
    for size, new_size in zip(before[2:], after[2:], strict=True):
        if not size or not new_size or new_size % size:
            return refusal
    return Verdict("DPU", "resize")


def _slice(graph: Graph, node: Node) -> Verdict:
    dim = int(node.attrs.get("dim", 0))
    step = int(node.attrs.get("step", 1))
    if dim > 1 or (dim == 1 and step == 1):
        return Verdict("DPU", "strided-slice")
    return _refused("it slices the batch, or channels in steps", OPERATOR_LIMITS)


def _activation(node: Node) -> str:
    """Return the operator. A clamp from 0 to 6 is a ReLU6."""
    bounds = (node.attrs.get("min"), node.attrs.get("max"))
    return "relu6" if node.op == "clamp" and bounds == (0, 6) else node.op


def _unquantized(plan: Plan, where: Layout, node: Node) -> str:
    """Return why the layer cannot run in 8-bit integers, or ""."""
    tensors = plan.of_layer(node.name)
    for role, tensor in tensors.items():
        why = _unfit(tensor.spec)
        if why:
            verb = "have" if role.startswith("weights") else "has"
            return f"its {role} {verb} {why}"
    if node.row.weight and "weights" not in tensors:
        return "its weights are not quantized"
    for name in node.refs():
        if not _is_quantized(plan, where, name):
            return f"{name} is not quantized"
    if not _is_quantized(plan, where, node.name):
        return "its output is not quantized"
    return ""


def _is_quantized(plan: Plan, where: Layout, name: str) -> bool:
    """Return whether a node's value is quantized, or no floating-point value."""
    if not plan.graph.by_name[name].is_float:
        return True
    point = quantization_point(plan.graph, where, name)
    if point is None:
        return False
    return (point, "activation") in plan.tensors or (point, "input") in plan.tensors


def _unfit(spec: QuantizationSpec) -> str:
    """Return why the DPU has no such codes, or ""."""
    if spec.dtype != "int":
        return f"the datatype {spec.dtype}"
    if spec.bit_width != 8:
        return f"{spec.bit_width} bits"
    if not (spec.symmetric and spec.signed):
        return "codes that are not signed and symmetric"
    if spec.is_dynamic:
        return "a dynamic range"
    if spec.scale_type != "poweroftwo" or spec.ch_axis is not None:
        return "no single power-of-two scale"
    return ""


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


def with_dpu_findings(plan: Plan) -> Plan:
    """Return a plan for the DPU with a warning if the DPU runs less than half of the
    convolutions and linear layers with quantized weights.
    """
    verdict_of = verdicts(plan)
    layers = []
    for node in plan.graph.nodes:
        is_planned = (node.name, "weights") in plan.tensors
        if node.row.is_linear_or_convolution and is_planned:
            layers.append(node.name)
    refused = [name for name in layers if verdict_of[name].device == "CPU"]
    if 2 * len(refused) <= len(layers):
        return plan
    has_norms = any(node.row.normalizes for node in plan.graph.nodes)
    is_encoder = has_norms and bool(cached_values(plan.graph))
    first = refused[0]
    warning = Diagnostic(
        "QZ357",
        f"the DPU runs {len(layers) - len(refused)} of {len(layers)} convolutions and linear "
        f"layers; {first} runs on the CPU: {verdict_of[first].why}"
        f"{_LOSES * is_encoder}",
        plan.settings.places.get("target_device"),
        "warning",
        help=_ways_out(),
    )
    return replace(plan, diagnostics=(*plan.diagnostics, warning))


def _ways_out() -> str:
    """Return what to do if the DPU runs few of the layers."""
    ways = (
        if_command("inspect", "`quantizer inspect --target DPU` says why for each layer"),
        if_command("init", "`quantizer init --device CPU` writes a config for a CPU"),
    )
    return "; ".join(filter(None, ways))
