"""Decides where the outputs of modules are quantized: where a traced network quantizes them,
after the ReLU that follows a layer.

Reads a trace and changes nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantizer.calibration.module_algorithms import TracedModules
from quantizer.config.model import Settings
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.plan.groups import layout
from quantizer.plan.model import TensorPlan

_TRACE = (
    "use quantizer.calibrate or the shell, which quantize a trace of the model, or leave its "
    "output_tensors out"
)
_FOLD = "fold the norm into the layer first (torch.nn.utils.fusion), "


@dataclass(frozen=True)
class PlacedOutputs:
    """Where the outputs of the plan's layers are quantized in a traced network.

    Attributes:
        floats: the layers whose outputs stay float in each call, and why.
        rectified: the layers whose outputs are quantized after a ReLU. Their modules compute
            max(x, 0) themselves. The ReLU of the model then changes nothing.
    """

    floats: Mapping[str, str]
    rectified: frozenset[str]


def placed_outputs(traced: TracedModules, settings: Settings) -> PlacedOutputs:
    """Return where the planned outputs are quantized.

    Raises:
        UsageError: an operator between a layer and the place where its output is quantized is
            one that its module cannot compute.
    """
    graph = run_passes(traced.graph, settings)
    groups = layout(graph)
    members = {}
    for group in groups.groups.values():
        for member in group.members:
            members[member] = group.members
    calls = defaultdict(list)
    for node, name in traced.names.items():
        if (name, "activation") in traced.plan.tensors:
            calls[name].append(node)
    floats = {}
    rectified = set()
    for name, nodes in calls.items():
        if all(node in groups.floats and node not in groups.groups for node in nodes):
            floats[name] = groups.floats[nodes[-1]]
            continue
        tensor = traced.plan.tensors[name, "activation"]
        follows = set()
        for node in nodes:
            if node not in graph.by_name:
                continue
            between = _folded(traced.graph, graph, node)
            if node in members:
                index = members[node].index(node)
                between += members[node][index + 1 :]
            _require_computable(tensor, between, traced.graph, graph)
            rows = [traced.graph.by_name[other].row for other in between]
            follows.add(any(row.rectifies for row in rows))
        if len(follows) > 1:
            text = f"{tensor.origins['dtype']}: {name} runs more than once, and a ReLU does not"
            raise UsageError(f"{text} always follow", help=_TRACE)
        if follows == {True}:
            rectified.add(name)
    return PlacedOutputs(floats, frozenset(rectified))


def _require_computable(
    tensor: TensorPlan, between: Iterable[str], traced: Graph, graph: Graph
) -> None:
    """Raise `UsageError` if an operator after a layer is one that its module cannot compute.

    Args:
        tensor: the output of the layer.
        between: the operators before the place where it is quantized.
        traced: the trace.
        graph: the trace after passes.
    """
    is_uniform = tensor.spec.qscheme == "per_tensor"
    for other in between:
        row = traced.by_name[other].row
        if row.rectifies or (row.kind == "passthrough" and is_uniform):
            continue
        fold = _FOLD if other in graph.absorbed else ""
        raise UsageError(
            f"{tensor.origins['dtype']}: the output of {tensor.layer} is quantized after "
            f"{other}, which its module does not compute",
            help=fold + _TRACE,
        )


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
