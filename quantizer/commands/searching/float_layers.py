"""Finds the layers that have to stay in float for gates to hold, at the least bytes: for a step
of `quantizer tune`, and for `quantizer analyze --metric`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantizer.calibration.events import Events, RunStage
from quantizer.cli import session
from quantizer.cli.terminal.follow import progress
from quantizer.cli.terminal.render import say_note
from quantizer.cli.terminal.screen import without_notes
from quantizer.commands.searching.trials import Figures, SearchContext, Subject, Trial, plan_of
from quantizer.config.forms.level_edits import with_float
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.roles import base_role, is_parameter
from quantizer.config.wording import counted
from quantizer.errors import GateError
from quantizer.evaluation.ablation import Ablation, ablate_calibrated
from quantizer.evaluation.analyze import NOISE_BATCHES, few
from quantizer.export.gates import (
    Gate,
    never_measured_metrics,
    not_measured_by_targets,
    parse_gate,
    require_known,
    require_known_names,
    require_known_parts,
    require_measured,
)
from quantizer.graph.ir import Graph
from quantizer.layerwise.fold import SCALE_OP
from quantizer.numerics.codes import bits_of
from quantizer.plan.floating import input_values
from quantizer.plan.joining.tied_scales import fused_layers
from quantizer.plan.model import Key, Plan
from quantizer.report.tables import finite_row
from quantizer.results.calibrated import Calibrated

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
    return sorted(parts, key=lambda part: (-part.noise / max(1, part.cost), part.layers))


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


def measured_tensors(
    subject: Subject, calibrated: Calibrated, events: Events | None = None
) -> Ablation:
    """Measure the effect of each quantized tensor on the output, on the first batches.

    `events` gets the progress, which has a bar of its own if it is None.
    """
    batches = min(subject.batches.total or NOISE_BATCHES, NOISE_BATCHES)
    total = batches * len(calibrated.solution.tensors)
    follower = events or progress(quiet=subject.options.json)
    with RunStage(follower, "analyze tensors", total, "tensors") as stage:
        return ablate_calibrated(
            calibrated,
            few(subject.on_device),
            after_tensor=stage.advance,
            is_alone_measured=True,
        )


@dataclass(frozen=True)
class FloatLayers:
    """The result of a search for layers to leave in float.

    Attributes:
        gate: that has to hold.
        chosen: the layers.
        config: with these layers in float.
        before: what was measured on the original config.
        after: what was measured on `config`.
        runs: the number of tests.
    """

    gate: Gate
    chosen: Sequence[FloatPart]
    config: JsonMapping
    before: Figures
    after: Figures
    runs: int

    def to_json(self) -> JsonObject:
        """Return the result for programs."""
        metrics = {}
        for when, figures in (("before", self.before), ("after", self.after)):
            of_gate = {self.gate.metric: figures.gated[self.gate.metric]}
            metrics[when] = finite_row({**figures.metrics, **of_gate})
        return {
            "metric": self.gate.text,
            "float": [
                {"layers": list(part.layers), "bytes": part.cost} for part in self.chosen
            ],
            "metrics": metrics,
            "runs": self.runs,
            "config": self.config,
        }

    def summary_lines(self, paths: Mapping[str, str]) -> list[str]:
        """Return the result for people, with layers by their module paths."""
        metric = self.gate.metric
        lines = [f"{metric} {self.before.gated[metric]:.6g} with the config as it is"]
        if not self.chosen:
            return [*lines, f"{self.gate.text} already holds: nothing is changed"]
        layers = layers_of(self.chosen)
        for layer in layers:
            lines.append(f"float: {paths.get(layer, layer)}")
        extra = sum(part.cost for part in self.chosen)
        lines.append(
            f"{metric} {self.after.gated[metric]:.6g} with them in float: "
            f"{counted(len(layers), 'layer')}, {extra / 1e6:.3f} MB of weights and of one "
            f"sample's values; {counted(self.runs, 'test run')}"
        )
        return lines


def cheapest_floats(subject: Subject, metric: str) -> tuple[FloatLayers, Ablation]:
    """Find the layers to leave in float for a metric to hold, at the least bytes.

    Returns:
        The layers, and the effects of all tensors.

    Raises:
        UsageError: there is no such metric.
        GateError: it does not hold, or only with the whole network in float.
    """
    options = subject.options
    gate = parse_gate(metric, "--metric")
    evaluator = session.evaluator_of(options, subject.loaded)
    if evaluator is None:
        require_known_names([gate], options.deploy)
    require_known_parts([gate], subject.original)
    require_measured([gate], never_measured_metrics(subject.original))
    evaluation = session.open_data(options, subject.loaded, evaluation=True)
    if evaluator is None:
        targets = not_measured_by_targets(evaluation.first(), subject.original)
        require_measured([gate], targets)
    context = SearchContext(subject, evaluation, [gate])
    start = Trial(subject.read.config.document)

    def after_test(layers: Sequence[str], figures: Figures) -> None:
        """Print the metric of a test."""
        value = figures.gated[gate.metric]
        say_note(f"{counted(len(layers), 'layer')} in float: {gate.metric} {value:.6g}")

    with context.shown_as("analyze") as whole:
        # This refuses a metric that is not measured, before all tensors are measured.
        before = context.measure(start)
        require_known([gate], before.gated)
        after_test((), before)
        calibrated, plan = context.calibrate(start)
        with without_notes():
            ablation = measured_tensors(subject, calibrated, context.bar)
        parts = float_parts(plan, ablation)
        whole.total = whole.done + most_trials(len(parts))
        search = FloatSearch(subject.original, start, before, context.measure, after_test)
        search.run(parts)
        tests = whole.done
    if search.best is None:
        raise GateError(
            f"{gate.text} does not hold even with all these layers in float",
            help="relax the bound of --metric",
        )
    if parts and len(search.best) == len(parts):
        raise GateError(
            f"{gate.text} holds only with all layers in float, where nothing is quantized",
            help="relax the bound of --metric",
        )
    config = search.trial.document
    floats = FloatLayers(gate, search.best, config, before, search.figures, tests)
    return floats, ablation
