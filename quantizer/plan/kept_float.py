"""Layers that a config keeps in float without naming them: by a global switch, or as part of a
residual stream.
"""

from quantizer.config.model import Config
from quantizer.graph.ir import Graph
from quantizer.plan.floating import OUTSIDE, before_norms, outside_stubs
from quantizer.plan.match import MatchedRule

FIRST_LAST = "keep_first_last_layer_accuracy"


def residual(config: Config, graph: Graph, rules: list[MatchedRule]) -> set[str]:
    """Layers whose outputs are no integers, as normalizations alone read them, but for those
    that the file speaks of; the DPU has no other memory than integers, and the hierarchical
    form says itself which outputs it means.
    """
    if config.form == "hierarchical" or config.settings.target_device == "DPU":
        return set()
    return before_norms(graph) - {
        name for row in rules if row.found.rank for name in row.found.layers
    }


def kept_float(config: Config, graph: Graph) -> dict[str, str]:
    """Layers that a global switch keeps in float, with the switch's name."""
    kept = dict.fromkeys(outside_stubs(graph), OUTSIDE)
    weighted = [
        node.name
        for node in graph.nodes
        if node.row.weight and node.params and node.op != "parameter"
    ]
    if config.settings.keep_first_last_layer_accuracy and weighted:
        kept |= dict.fromkeys((weighted[0], weighted[-1]), FIRST_LAST)
    if config.settings.keep_add_layer_accuracy:
        kept |= {
            node.name: "keep_add_layer_accuracy" for node in graph.nodes if node.op == "add"
        }
    return kept
