"""Finds the layers that have to stay in float for gates to hold, at the least bytes."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from quantizer.commands.searching.search import plan_of
from quantizer.commands.searching.trial import Figures, Trial
from quantizer.config.forms.level_edits import with_float
from quantizer.config.roles import base_role, is_parameter
from quantizer.evaluation.ablation import Ablation
from quantizer.graph.ir import Graph
from quantizer.layerwise.fold import SCALE_OP
from quantizer.numerics.codes import bits_of
from quantizer.plan.floating import input_values
from quantizer.plan.joining.tied_scales import fused_layers
from quantizer.plan.model import Key, Plan

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


def layers_of(parts: Iterable[FloatPart]) -> tuple[str, ...]:
    """Return the layers of all parts, in order."""
    layers: list[str] = []
    for part in parts:
        layers += part.layers
    return tuple(layers)


class FloatSearch:
    """Tests a config with layers in float.

    Args:
        original: the traced model, before passes.
        trial: the config that is changed.
        figures: what was measured on it.
        measure: returns what is measured on a trial.
        after_test: called with the layers and the figures of each test.

    Attributes:
        best: the fewest parts so far with which the gates hold; None if there are none.
        figures: what was measured with them in float.
    """

    def __init__(
        self,
        original: Graph,
        trial: Trial,
        figures: Figures,
        measure: Callable[[Trial], Figures],
        after_test: Callable[[Sequence[str], Figures], None] = lambda layers, figures: None,
    ) -> None:
        self.best: Sequence[FloatPart] | None = [] if figures.is_met else None
        self.figures = figures
        self._original = original
        self._trial = trial
        self._measure = measure
        self._after_test = after_test

    def run(self, parts: Sequence[FloatPart]) -> None:
        """Find the fewest leading parts with which the gates hold, without those that they do
        not need.

        Args:
            parts: as `float_parts` orders them. About log2(n) tests are run with some of them,
                and one more for each of a few parts.
        """
        if self.best is not None or not self._holds(parts):
            return
        # The gates do not hold with the first `low` parts, and hold with the first `high`.
        low = 0
        high = len(parts)
        while high - low > 1:
            middle = (low + high) // 2
            if self._holds(parts[:middle]):
                high = middle
            else:
                low = middle
        chosen = list(parts[:high])
        if len(chosen) > MAX_PRUNED:
            return
        # The gates need the last one: they did not hold without it.
        optional = sorted(chosen[:-1], key=lambda part: -part.cost)
        for part in optional:
            without = [other for other in chosen if other is not part]
            if self._holds(without):
                chosen = without

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the layers of the best parts."""
        return layers_of(self.best or ())

    @property
    def quantizes_weights(self) -> bool:
        """Return whether a weight is quantized with the best parts in float."""
        plan = self._plan(self.layers)
        return any(base_role(role) == "weights" for _, role in plan.tensors)

    @property
    def trial(self) -> Trial:
        """Return the trial with the best parts in float, which names as few layers as it can.

        A layer whose tensors are quantized together with those of another one needs no entry.
        """
        needed = list(self.layers)
        plan = self._plan(needed)
        for rule in plan.rules:
            if not rule.leaves_float or rule.took_effect:
                continue
            fewer = [name for name in needed if name not in rule.layers]
            if self._plan(fewer).specs == plan.specs:
                needed = fewer
        return self._with_float(needed)

    def _holds(self, parts: Sequence[FloatPart]) -> bool:
        """Return whether the gates hold with these parts in float."""
        if not parts:
            return False
        layers = layers_of(parts)
        figures = self._measure(self._with_float(layers))
        self._after_test(layers, figures)
        if figures.is_met:
            self.best = parts
            self.figures = figures
        return figures.is_met

    def _plan(self, layers: Sequence[str]) -> Plan:
        """Return the plan with these layers in float."""
        return plan_of(self._with_float(layers), self._original)

    def _with_float(self, layers: Sequence[str]) -> Trial:
        """Return the trial that names these layers."""
        return replace(self._trial, document=with_float(self._trial.document, layers))


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
