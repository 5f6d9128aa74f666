"""Runs the parts of `quantizer analyze` that calibrate: `--tensors` and `--metric`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantizer.calibration.events import Events, RunStage
from quantizer.cli import session
from quantizer.cli.modes.gates import (
    Gate,
    never_measured_metrics,
    not_measured_by_targets,
    parse_gate,
    require_known,
    require_known_names,
    require_known_parts,
    require_measured,
)
from quantizer.cli.terminal.follow import progress
from quantizer.cli.terminal.render import say_note
from quantizer.cli.terminal.screen import without_notes
from quantizer.commands.searching.float_layers import (
    FloatPart,
    FloatSearch,
    float_parts,
    layers_of,
    most_trials,
)
from quantizer.commands.searching.search_context import SearchContext, Subject
from quantizer.commands.searching.trial import Figures, Trial
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.wording import counted
from quantizer.errors import GateError
from quantizer.evaluation.ablation import Ablation, ablate_calibrated
from quantizer.evaluation.analyze import NOISE_BATCHES, few
from quantizer.graph.channels.output_parts import output_parts
from quantizer.report.tables import finite_row
from quantizer.results.calibrated import Calibrated


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
        require_known_names([gate], options)
    require_known_parts([gate], output_parts(subject.original))
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
