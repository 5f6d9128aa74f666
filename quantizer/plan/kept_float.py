"""Finds layers that stay float without an entry in the config: because of a global switch, or
because they are in a transformer's residual stream. Some have few weights, which a group size
does not divide.
"""

from quantizer.config.model import ResolvedConfig
from quantizer.graph.ir import Graph, Node
from quantizer.plan.floating import (
    OUTSIDE,
    SCALED,
    before_norms,
    derived_layers,
    outside_stubs,
    scaled_inputs,
)
from quantizer.plan.match import MatchedRule
from quantizer.plan.model import RANKS

FIRST_LAST = "keep_first_last_layer_accuracy"
ROUTER = "chooses experts, and engines compute it in float"
_ENTRIES = ("input", "module_input")


def residual(config: ResolvedConfig, graph: Graph, rules: list[MatchedRule]) -> set[str]:
    """Return the layers of the residual stream, which only normalizations read.

    Layers that the config selects by type or name are not among them. For the DPU, which stores
    integers only, and in the hierarchical form, which states the outputs to quantize, return no
    layers.
    """
    if config.form == "hierarchical" or config.settings.target_device == "DPU":
        return set()
    layers = before_norms(graph)
    for rule in rules:
        # Only the selector "all" has rank 0
        if rule.match.rank:
            layers.difference_update(rule.match.layers)
    return layers


def layers_kept_float(
    config: ResolvedConfig, graph: Graph, rules: list[MatchedRule]
) -> dict[str, str]:
    """Return the layers that a global switch or the model's stubs keep in float, with the
    reason, and the routers of experts that no rule names.
    """
    reasons = dict.fromkeys(outside_stubs(graph), OUTSIDE)
    scaled = scaled_inputs(graph)
    reasons.update(dict.fromkeys(scaled, SCALED))
    routers: list[str] = []
    if any(node.row.experts or "experts." in node.scope for node in graph.nodes):
        from quantizer.graph.structure.language_parts import router_layers

        routers = router_layers(graph)
    named: set[str] = set()
    for rule in rules:
        if RANKS[rule.match.rank] not in ("all", "weighted", "type"):
            named.update(rule.match.layers)
    for router in routers:
        if router not in named:
            reasons[router] = ROUTER
    if config.settings.keep_first_last_layer_accuracy:
        weighted = []
        for node in graph.nodes:
            if node.row.weight and node.params and node.op != "parameter":
                weighted.append(node.name)
        reasons.update(dict.fromkeys(weighted[:1] + weighted[-1:], FIRST_LAST))
    if config.settings.keep_add_layer_accuracy:
        for node in graph.nodes:
            if node.op == "add":
                reasons[node.name] = "keep_add_layer_accuracy"
    return reasons


def is_apart(graph: Graph, node: Node) -> bool:
    """Return whether the layer is a convolution whose kernels read one channel each, or an
    embedding of positions.
    """
    if node.row.spatial:
        is_transposed = node.row.transposed
        return not is_transposed and graph.weight(node).shape[1] == 1
    return node.row.looks_up and not _looks_up_tokens(graph, node)


def _looks_up_tokens(graph: Graph, node: Node) -> bool:
    """Return whether the indices are those of an input, at most moved. Indices that are
    computed, from these or from sizes, are positions.
    """
    source = graph.source(node)
    while source is not None and source.row.only_moves:
        source = graph.source(source)
    if source is None or source.op in _ENTRIES:
        return True
    return source.name not in derived_layers(graph)
