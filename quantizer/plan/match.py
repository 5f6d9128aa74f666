"""The layers to which the rules of a config apply."""

from collections.abc import Set
from dataclasses import dataclass, replace

from quantizer.config.model import ConfigRule, Role, Selector
from quantizer.graph.ir import Graph, Node
from quantizer.plan.model import RANKS, Match, RuleMatch


@dataclass
class MatchedRule:
    """A rule with the match of its selector. `effects` counts the tensors for which it sets
    something.
    """

    rule: ConfigRule
    match: Match
    effects: int = 0

    def configures(self, role: Role) -> bool:
        """Return whether it says how, or whether, tensors of a role are quantized."""
        roles = (*(self.rule.roles or ()), *self.rule.adds)
        return role in roles or bool(self.rule.fields.get(role))

    def selects(self, layers: Set[str]) -> bool:
        """Return whether it selects one of the layers with all tensors. A rule with keys
        selects these inputs only.
        """
        return not self.match.keys and not layers.isdisjoint(self.match.layers)

    def quantizes(self, role: Role, before: bool) -> bool:
        """Return whether the role is quantized after the rule. A rule without roles leaves it
        as it was `before`.
        """
        if role in self.rule.adds:
            return True
        return before if self.rule.roles is None else role in self.rule.roles

    def summary(self) -> RuleMatch:
        """Return the entry of the plan."""
        selector = self.rule.selector
        return RuleMatch(
            label=self.rule.label,
            selector=selector.text or selector.kind,
            layers=self.match.layers,
            took_effect=self.effects,
            place=str(selector.place or ""),
            leaves_float=self.rule.leaves_float and self.match.rank >= RANKS.index("type"),
        )


def match(selector: Selector, graph: Graph, original: Graph) -> Match:
    """Return the layers of `graph` that `selector` matches. `original` is the graph as traced,
    before layers were folded.

    The name of a folded layer selects the layer it was folded into, its type does not.
    """
    if selector.kind == "all":
        return Match(tuple(graph.by_name), RANKS.index("all"))
    if selector.kind == "weighted":
        weighted: list[str] = []
        for node in graph.nodes:
            if has_own_weights(node):
                weighted.append(node.name)
        return Match(tuple(weighted), RANKS.index("weighted"))
    from quantizer.plan.selected import attentions, by_name, by_type

    if selector.kind == "type":
        return by_type(selector.text, graph, original)
    named = by_name(selector.text, graph, original)
    if selector.kind == "exclude":
        return replace(named, rank=RANKS.index("exclude"))
    if selector.kind == "cache":
        return attentions(named, graph)
    if selector.kind == "cache_source":
        # The cache is quantized even if the layers that compute it are excluded
        rank = RANKS.index("cache")
        return replace(named, rank=rank, named=named.layers)
    return named


def has_own_weights(node: Node) -> bool:
    """Return whether the node is a module such as Linear, with weights of its own. A trained
    tensor in an expression is none.
    """
    if node.op in ("parameter", "channel_scale"):
        return False
    return node.row.weight and bool(node.params)
