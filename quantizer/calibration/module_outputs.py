"""Where outputs of modules are quantized: where a traced network does it, after the ReLU that
follows a layer.

Looks at a trace and changes nothing.
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


def kept_float(traced: TracedModules, settings: Settings) -> dict[str, str]:
    """Return the plan's layers whose outputs stay float in a traced network, in each call, and
    why.
    """
    where = layout(run_passes(traced.graph, settings))
    reasons: dict[str, str] = {}
    quantized: set[str] = set()
    for node, name in traced.names.items():
        if (name, "activation") not in traced.plan.tensors:
            continue
        if node in where.floats and node not in where.groups:
            reasons[name] = where.floats[node]
        else:
            quantized.add(name)
    return {name: why for name, why in reasons.items() if name not in quantized}


def rectified(traced: TracedModules, settings: Settings) -> frozenset[str]:
    """The plan's layers whose outputs are quantized after a ReLU.

    max(x, 0) may be taken twice, so these modules take it themselves, and the model's own
    changes nothing any more.

    Raises:
        UsageError: between a layer and where its output is quantized stands what its module
            cannot do.
    """
    graph = run_passes(traced.graph, settings)
    where = layout(graph)
    groups = {member: group for group in where.groups.values() for member in group.members}
    found: dict[str, set[bool]] = {}
    for node, name in traced.names.items():
        tensor = traced.plan.tensors.get((name, "activation"))
        if tensor is None or node not in graph.by_name:
            continue
        between = _folded(traced.graph, graph, node)
        if node in groups:
            members = groups[node].members
            between += members[members.index(node) + 1 :]
        place, is_uniform = tensor.origins["dtype"], tensor.spec.qscheme == "per_tensor"
        rows = {each: traced.graph.by_name[each].row for each in between}
        for each, row in rows.items():
            if not row.rectifies and not (row.kind == "passthrough" and is_uniform):
                text = (
                    f"{place}: the output of {name} is quantized after {each}, which its "
                    "module does not do"
                )
                raise _refused(text, _FOLD if each in graph.absorbed else "")
        found.setdefault(name, set()).add(any(row.rectifies for row in rows.values()))
        if len(found[name]) > 1:
            raise _refused(
                f"{place}: {name} runs more than once, and a ReLU does not always follow"
            )
    return frozenset(name for name, follows in found.items() if True in follows)


def _folded(traced: Graph, graph: Graph, node: str) -> list[str]:
    """The norms after a node that are folded into it."""
    taken = [
        traced.by_name[name]
        for name, taker in graph.absorbed.items()
        if taker == node and name in traced.by_name
    ]
    return [norm.name for norm in taken if norm.row.kind != "structural"]


def _refused(message: str, help_: str = "") -> UsageError:
    return UsageError(message, help=help_ + _TRACE)
