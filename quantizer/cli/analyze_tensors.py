"""The parts of `quantizer analyze` that calibrate: what each tensor costs the output, what has
to stay in float.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from quantizer.calibration import steps
from quantizer.calibration.events import Stage
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import TracedTarget
from quantizer.cli import session
from quantizer.cli.follow import followed, progress
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
from quantizer.errors import GateError
from quantizer.evaluation.ablation import Ablation, ablate
from quantizer.evaluation.analyze import NOISE_BATCHES, few
from quantizer.evaluation.cheapest import FloatPart, cheapest_parts, float_parts
from quantizer.evaluation.measurable import not_measured, not_measured_by_targets
from quantizer.evaluation.scores import score
from quantizer.graph.ir import Graph
from quantizer.graph.output_parts import output_parts
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.report.tables import finite
from quantizer.results.calibrated import Calibrated
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate, LoadedModel, load_evaluate


@dataclass(frozen=True)
class Subject:
    """A model, its data, and the config that is analysed."""

    options: Options
    read: ReadConfig
    loaded: LoadedModel
    batches: Batches
    original: Graph

    def calibrated(self, config: Config) -> tuple[Calibrated, Plan]:
        """The model calibrated with a config, in memory."""
        request = CalibrationRequest(
            target=TracedTarget(self.original),
            config=config,
            batches=self.batches,
            events=followed(self.read.sources, quiet=True),
            seed=self.options.seed,
            memory=self.options.memory,
        )
        state = steps.run(request)
        calibrated = Calibrated(self.original, config.settings, state.solution)
        return calibrated, state.calibration.plan


def measured_tensors(subject: Subject) -> tuple[Ablation, Plan]:
    """What each quantized tensor does to the output, on the first batches."""
    calibrated, plan = subject.calibrated(subject.read.config)
    quantized, batches = calibrated.network(), subject.batches
    count = sum(1 for _ in quantized.quantizers())
    total = count * min(batches.total or NOISE_BATCHES, NOISE_BATCHES)
    with Stage(
        progress(quiet=subject.options.json), "analyze tensors", total, "tensors"
    ) as stage:
        here = few(lambda: session.on_device(subject.options, batches))
        user = None if calibrated.user_graph is None else Network(calibrated.user_graph)
        reference = Network(calibrated.float_graph)
        return ablate(reference, quantized, here, after_tensor=stage.advance, user=user), plan


@dataclass(frozen=True)
class Found:
    """The layers to leave in float, the config that does, and the metrics before and after."""

    chosen: Sequence[FloatPart]
    config: Mapping[str, Any]
    before: Mapping[str, float]
    after: Mapping[str, float]
    runs: int

    @property
    def text(self) -> str:
        """Of the config."""
        return json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"

    def to_json(self, gate: Gate) -> dict[str, Any]:
        """For programs."""
        floats = [{"layers": list(part.layers), "bytes": part.cost} for part in self.chosen]
        metrics = {
            when: {name: finite(value) for name, value in found.items()}
            for when, found in (("before", self.before), ("after", self.after))
        }
        return {
            "metric": gate.text,
            "float": floats,
            "metrics": metrics,
            "runs": self.runs,
            "config": self.config,
        }

    def lines(self, gate: Gate, paths: Mapping[str, str]) -> list[str]:
        """For people."""
        said = [f"{gate.metric} {self.before[gate.metric]:.6g} as the config is"]
        if not self.chosen:
            return [*said, f"{gate.text} holds already: nothing is changed"]
        names = [paths.get(layer, layer) for part in self.chosen for layer in part.layers]
        extra = sum(part.cost for part in self.chosen)
        more = (
            f"{len(names)} layers, {extra / 1e6:.3f} MB of weights and of one sample's values"
        )
        tests = f"{self.runs} test runs"
        return [
            *said,
            *(f"float: {name}" for name in names),
            f"{gate.metric} {self.after[gate.metric]:.6g} with them in float: {more}; {tests}",
        ]


def cheapest_floats(subject: Subject, metric: str) -> tuple[Found, Gate, Ablation]:
    """The fewest bytes to leave in float for a metric to hold.

    Raises:
        UsageError: there is no such metric.
        GateError: it does not hold with all layers in float.
    """
    options, gate = subject.options, parse_gate(metric, "--metric")
    loaded = subject.loaded
    evaluator: Evaluate | None = loaded.evaluate
    if options.evaluate:
        evaluator = load_evaluate(options.evaluate, loaded.directions)
    directions = BY_NAME if evaluator is None else evaluator.directions
    if evaluator is None:
        require_known(about_all([gate]), names_in_test(MEASURED, options))
    require_known_parts([gate], output_parts(subject.original))
    evaluation = session.open_data(options, loaded, evaluation=True)
    require_measured([gate], not_measured(subject.original))
    if evaluator is None:
        require_measured([gate], not_measured_by_targets(evaluation.first(), subject.original))
    runs = dict[tuple[str, ...], Mapping[str, float]]()

    def document(chosen: Sequence[FloatPart]) -> dict[str, Any]:
        return with_float(
            subject.read.config.document, [name for part in chosen for name in part.layers]
        )

    def check(metrics: Collection[str]) -> None:
        require_known(about_all([gate]), names_in_test(metrics, options, directions))

    def holds(chosen: Sequence[FloatPart]) -> bool:
        key = tuple(name for part in chosen for name in part.layers)
        if key not in runs:
            config = check_document(
                Document.of(document(chosen), "the config with layers in float")
            ).require()
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
            click.echo(f"{len(key)} layers in float: {gate.metric} {value:.6g}", err=True)
        return gate.holds(runs[key])

    holds(())  # a metric that nobody measures is refused before all tensors are
    found, plan = measured_tensors(subject)
    candidates = float_parts(plan, found)
    chosen = cheapest_parts(candidates, holds)
    if chosen is None:
        raise GateError(
            f"{gate.text} does not hold with any of these layers in float",
            help="lower the bound",
        )
    key = tuple(name for part in chosen for name in part.layers)
    return Found(chosen, document(chosen), runs[()], runs[key], len(runs)), gate, found
