"""Finds the layers that have to stay in float for a metric to hold, at the least bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantizer.algorithms.fold import SCALE_OP
from quantizer.config.roles import is_parameter
from quantizer.evaluation.ablation import Ablation
from quantizer.graph.ir import Graph
from quantizer.numerics.codes import bits_of
from quantizer.plan.floating import input_values
from quantizer.plan.model import Key, Plan
from quantizer.plan.tied_scales import fused_layers

MAX_PRUNED = 12
"""Up to so many chosen parts, each is tried in its quantized form again: it may only have
come before those that matter.
"""


@dataclass(frozen=True)
class FloatPart:
    """Layers that are quantized together and can stay in float together.

    Attributes:
        layers: their names, in execution order.
        noise: the output noise that their tensors cause.
        cost: the bytes that they take more in float.
    """

    layers: tuple[str, ...]
    noise: float
    cost: int

    def rank(self) -> tuple[float, tuple[str, ...]]:
        """Return the sort key: most noise per byte first."""
        per_byte = self.noise / max(1, self.cost)
        return -per_byte, self.layers


def float_parts(plan: Plan, ablation: Ablation) -> list[FloatPart]:
    """Return all parts that can stay in float, those with the most noise per byte first."""
    part_of = _parts_by_layer(plan)
    members: dict[str, list[str]] = {}
    for name, first in part_of.items():
        members.setdefault(first, []).append(name)
    total_noise = math.fsum(ablation.noise)
    noises: dict[str, float] = {}
    costs: dict[str, int] = {}
    for effect in ablation.effects:
        first = part_of[effect.key[0]]
        noises.setdefault(first, 0.0)
        costs.setdefault(first, 0)
        noise = total_noise - math.fsum(effect.without)
        noises[first] += max(0.0, noise)
        costs[first] += _extra_bytes(plan, effect.key)
    order = plan.graph.index
    parts = []
    for first, noise in noises.items():
        names = {_layer_of_model(plan.graph, name) for name in members[first]}
        layers = sorted(names, key=order.__getitem__)
        parts.append(FloatPart(tuple(layers), noise, costs[first]))
    parts.sort(key=FloatPart.rank)
    return parts


def _layer_of_model(graph: Graph, name: str) -> str:
    """Return the layer that a config names for a layer of the graph. Calibration inserts scales
    of channels behind inputs and their normalizations, and an input in float needs none.
    """
    node = graph.by_name[name]
    if node.op != SCALE_OP or next(node.refs()) not in input_values(graph):
        return name
    while node.op != "input":
        node = graph.by_name[next(node.refs())]
    return node.name


def _parts_by_layer(plan: Plan) -> dict[str, str]:
    """Return for each layer the first one of its part.

    Layers that share an activation's quantization are one part. So are layers that engines
    fuse.
    """
    owner: dict[str, str] = {}
    for name, role in plan.tensors:
        owner[name] = name
        for member in plan.tensors[name, role].members:
            owner[member] = member

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    for (name, role), tensor in plan.tensors.items():
        if not is_parameter(role):
            for member in tensor.members:
                owner[root(member)] = root(name)
    for group in fused_layers(plan.graph):
        members = [name for name in group if name in owner]
        for member in members[1:]:
            owner[root(member)] = root(members[0])
    return {name: root(name) for name in owner}


def most_trials(count: int) -> int:
    """Return the largest number of tests of a search in so many parts, after the first one.

    >>> most_trials(8)
    11
    """
    others = max(count - 1, 0)
    halvings = others.bit_length()
    prunings = min(others, MAX_PRUNED)
    return 1 + halvings + prunings


def cheapest_parts(
    parts: Sequence[FloatPart], holds: Callable[[Sequence[FloatPart]], bool]
) -> list[FloatPart] | None:
    """Return the fewest leading parts with which the metric holds, without those it does not
    need; None if it does not hold with all of them.

    Args:
        parts: as `float_parts` orders them.
        holds: runs a test with these parts in float. It is called about log2(n) times, and once
            more for each of a few parts.
    """
    if holds([]):
        return []
    if not holds(parts):
        return None
    # The metric does not hold with the first `low` parts, and holds with the first `high`.
    low = 0
    high = len(parts)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(parts[:middle]):
            high = middle
        else:
            low = middle
    chosen = list(parts[:high])
    if len(chosen) > MAX_PRUNED:
        return chosen
    # The metric needs the last one: it did not hold without it.
    optional = sorted(chosen[:-1], key=lambda part: -part.cost)
    for part in optional:
        without = [other for other in chosen if other is not part]
        if holds(without):
            chosen = without
    return chosen


def needed_layers(layers: Sequence[str], plan_of: Callable[[Sequence[str]], Plan]) -> list[str]:
    """Return the layers that a config has to name so that all of `layers` stay in float.

    A layer whose tensors are quantized together with those of another one needs no entry.

    Args:
        layers: the layers in float.
        plan_of: returns the plan of the config that names some layers.
    """
    needed = list(layers)
    plan = plan_of(needed)
    for rule in plan.rules:
        if not rule.leaves_float or rule.took_effect:
            continue
        fewer = [name for name in needed if name not in rule.layers]
        if plan_of(fewer).specs == plan.specs:
            needed = fewer
    return needed


def _extra_bytes(plan: Plan, key: Key) -> int:
    """Return the bytes that a tensor takes more in float: of a weight, or of one sample's
    activation.
    """
    tensor = plan.tensors[key]
    if is_parameter(key[1]):
        values = plan.parameter(key).numel()
    else:
        node = plan.graph.by_name[tensor.source]
        values = 1
        for size in (node.shape or ())[1:]:
            if size is not None:
                values *= size
    extra_bits = max(0, 32 - bits_of(tensor.spec))
    return values * extra_bits // 8
