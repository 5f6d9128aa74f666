"""Runs the parts of `quantizer analyze` that calibrate: `--tensors` and `--metric`."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from quantizer.calibration import steps
from quantizer.calibration.events import RunStage
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import TracedTarget
from quantizer.cli import session
from quantizer.cli.float_mode import evaluator_of
from quantizer.cli.follow import progress, run_display
from quantizer.cli.gates import (
    MEASURED,
    Gate,
    about_all,
    names_in_test,
    parse_gate,
    require_known,
    require_known_parts,
    require_measured,
)
from quantizer.cli.options import Options
from quantizer.cli.session import ReadConfig
from quantizer.config.document.document import Document
from quantizer.config.forms.left_float import with_float
from quantizer.config.load import check_document
from quantizer.config.model import Config
from quantizer.config.wording import counted
from quantizer.errors import GateError
from quantizer.evaluation.ablation import Ablation, ablate
from quantizer.evaluation.analyze import NOISE_BATCHES, few
from quantizer.evaluation.cheapest import FloatPart, cheapest_parts, float_parts
from quantizer.evaluation.measurable import never_measured_metrics, not_measured_by_targets
from quantizer.evaluation.scores import score
from quantizer.graph.ir import Graph
from quantizer.graph.output_parts import output_parts
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.report.tables import finite_row
from quantizer.results.calibrated import Calibrated
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import LoadedModel


@dataclass(frozen=True)
class Subject:
    """A config, with the model and data that it is analysed on."""

    options: Options
    read: ReadConfig
    loaded: LoadedModel
    batches: Batches
    original: Graph

    def calibrated(self, config: Config) -> tuple[Calibrated, Plan]:
        """Return the model calibrated with a config, in memory, and the plan."""
        request = CalibrationRequest(
            target=TracedTarget(self.original),
            config=config,
            batches=self.batches,
            events=run_display(self.read.sources, quiet=True),
            seed=self.options.seed,
            memory=self.options.memory,
        )
        state = steps.run_calibration(request)
        calibrated = Calibrated(self.original, config.settings, state.solution)
        return calibrated, state.calibration.plan


def measured_tensors(subject: Subject) -> tuple[Ablation, Plan]:
    """Measure the effect of each quantized tensor on the output, on the first batches."""
    options = subject.options
    calibrated, plan = subject.calibrated(subject.read.config)
    quantized = calibrated.network()
    batches = min(subject.batches.total or NOISE_BATCHES, NOISE_BATCHES)
    total = batches * len(list(quantized.quantizers()))
    user = None if calibrated.user_graph is None else Network(calibrated.user_graph)
    with RunStage(progress(quiet=options.json), "analyze tensors", total, "tensors") as stage:
        ablation = ablate(
            Network(calibrated.float_graph),
            quantized,
            few(lambda: session.on_device(options, subject.batches)),
            after_tensor=stage.advance,
            user=user,
        )
    return ablation, plan


@dataclass(frozen=True)
class FloatSearch:
    """The result of a search for layers to leave in float.

    Attributes:
        gate: that has to hold.
        chosen: the layers.
        config: with these layers in float.
        before: the metrics of the original config.
        after: the metrics of `config`.
        runs: the number of tests.
    """

    gate: Gate
    chosen: Sequence[FloatPart]
    config: Mapping[str, Any]
    before: Mapping[str, float]
    after: Mapping[str, float]
    runs: int

    @property
    def text(self) -> str:
        """Return the text of the config."""
        return json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        floats = [{"layers": list(part.layers), "bytes": part.cost} for part in self.chosen]
        metrics = {"before": finite_row(self.before), "after": finite_row(self.after)}
        return {
            "metric": self.gate.text,
            "float": floats,
            "metrics": metrics,
            "runs": self.runs,
            "config": self.config,
        }

    def summary_lines(self, paths: Mapping[str, str]) -> list[str]:
        """Return the result for people, with layers by their module paths."""
        metric = self.gate.metric
        lines = [f"{metric} {self.before[metric]:.6g} with the config as it is"]
        if not self.chosen:
            return [*lines, f"{self.gate.text} already holds: nothing is changed"]
        layers = layers_of(self.chosen)
        for layer in layers:
            lines.append(f"float: {paths.get(layer, layer)}")
        extra = sum(part.cost for part in self.chosen)
        lines.append(
            f"{metric} {self.after[metric]:.6g} with them in float: "
            f"{counted(len(layers), 'layer')}, {extra / 1e6:.3f} MB of weights and of one "
            f"sample's values; {counted(self.runs, 'test run')}"
        )
        return lines


def layers_of(parts: Sequence[FloatPart]) -> tuple[str, ...]:
    """Return the layers of all parts."""
    layers: list[str] = []
    for part in parts:
        layers += part.layers
    return tuple(layers)


def cheapest_floats(subject: Subject, metric: str) -> tuple[FloatSearch, Ablation]:
    """Find the layers to leave in float for a metric to hold, at the least bytes.

    Returns:
        The layers, and the effects of all tensors.

    Raises:
        UsageError: there is no such metric.
        GateError: it does not hold with all layers in float.
    """
    options = subject.options
    gate = parse_gate(metric, "--metric")
    loaded = subject.loaded
    evaluator = evaluator_of(options, loaded)
    directions = BY_NAME if evaluator is None else evaluator.directions
    if evaluator is None:
        require_known(about_all([gate]), names_in_test(MEASURED, options))
    require_known_parts([gate], output_parts(subject.original))
    evaluation = session.open_data(options, loaded, evaluation=True)
    require_measured([gate], never_measured_metrics(subject.original))
    if evaluator is None:
        require_measured([gate], not_measured_by_targets(evaluation.first(), subject.original))
    runs: dict[tuple[str, ...], Mapping[str, float]] = {}

    def document(chosen: Sequence[FloatPart]) -> dict[str, Any]:
        return with_float(subject.read.config.document, list(layers_of(chosen)))

    def check(metrics: Collection[str]) -> None:
        require_known(about_all([gate]), names_in_test(metrics, options, directions))

    def holds(chosen: Sequence[FloatPart]) -> bool:
        key = layers_of(chosen)
        if key not in runs:
            changed = Document.of(document(chosen), "the config with layers in float")
            config = check_document(changed).require()
            calibrated, _ = subject.calibrated(config)
            follower = progress(quiet=options.json)
            scores = score(
                calibrated,
                loaded.module,
                evaluation,
                follower,
                function=evaluator,
                check=check,
            )
            require_known([gate], scores.gated)
            value = scores.gated[gate.metric]
            runs[key] = scores.metrics | {gate.metric: value}
            layers = counted(len(key), "layer")
            click.echo(f"{layers} in float: {gate.metric} {value:.6g}", err=True)
        return gate.holds(runs[key])

    # This refuses a metric that is not measured, before all tensors are measured.
    holds(())
    ablation, plan = measured_tensors(subject)
    chosen = cheapest_parts(float_parts(plan, ablation), holds)
    if chosen is None:
        raise GateError(
            f"{gate.text} does not hold even with all these layers in float",
            help="relax the bound of --metric",
        )
    search = FloatSearch(
        gate,
        chosen,
        document(chosen),
        before=runs[()],
        after=runs[layers_of(chosen)],
        runs=len(runs),
    )
    return search, ablation
