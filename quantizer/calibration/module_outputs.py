"""Decides where the outputs of modules are quantized: where a traced network quantizes them,
after the ReLU that follows a layer.

Reads a trace and changes nothing.
"""

from quantizer.calibration.module_algorithms import TracedModules
from quantizer.config.model import Settings
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.plan.groups import layout

_TRACE = (
    "use quantizer.calibrate or the shell, which quantize a trace of the model, or leave its "
    "output_tensors out"
)
_FOLD = "fold the norm into the layer first (torch.nn.utils.fusion), "


def float_outputs(traced: TracedModules, settings: Settings) -> dict[str, str]:
    """Return the plan's layers whose outputs stay float in a traced network, in each call, and
    why.
    """
    graph = run_passes(traced.graph, settings)
    groups = layout(graph)
    reasons = {}
    quantized = set()
    for node, name in traced.names.items():
        if (name, "activation") not in traced.plan.tensors:
            continue
        if node in groups.floats and node not in groups.groups:
            reasons[name] = groups.floats[node]
        else:
            quantized.add(name)
    for name in quantized:
        reasons.pop(name, None)
    return reasons


def layers_quantized_after_relu(traced: TracedModules, settings: Settings) -> frozenset[str]:
    """Return the plan's layers whose outputs are quantized after a ReLU.

    These modules compute max(x, 0) themselves. The ReLU of the model then changes nothing.

    Raises:
        UsageError: an operator between a layer and the place where its output is quantized is
            one that its module cannot compute.
    """
    graph = run_passes(traced.graph, settings)
    members = {}
    for group in layout(graph).groups.values():
        for member in group.members:
            members[member] = group.members
    follows: dict[str, bool] = {}
    for node, name in traced.names.items():
        tensor = traced.plan.tensors.get((name, "activation"))
        if tensor is None or node not in graph.by_name:
            continue
        place = tensor.origins["dtype"]
        is_uniform = tensor.spec.qscheme == "per_tensor"
        between = _folded(traced.graph, graph, node)
        if node in members:
            index = members[node].index(node)
            between += members[node][index + 1 :]
        is_rectified = False
        for other in between:
            row = traced.graph.by_name[other].row
            is_rectified |= row.rectifies
            if not row.rectifies and not (row.kind == "passthrough" and is_uniform):
                text = (
                    f"{place}: the output of {name} is quantized after {other}, which its "
                    "module does not compute"
                )
                fold = _FOLD if other in graph.absorbed else ""
                raise UsageError(text, help=fold + _TRACE)
        if follows.setdefault(name, is_rectified) != is_rectified:
            text = f"{place}: {name} runs more than once, and a ReLU does not always follow"
            raise UsageError(text, help=_TRACE)
    return frozenset(name for name, is_rectified in follows.items() if is_rectified)


def _folded(traced: Graph, graph: Graph, node: str) -> list[str]:
    """Return the norms after a node that are folded into it."""
    names = []
    for name, target in graph.absorbed.items():
        norm = traced.by_name.get(name)
        if target != node or norm is None:
            continue
        if norm.row.kind != "structural":
            names.append(name)
    return names
