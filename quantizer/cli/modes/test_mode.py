"""Runs `--quant_mode test`: compares the calibrated network with the float one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from quantizer.calibration import fingerprint, memory_prediction
from quantizer.calibration.events import ForkedEvents
from quantizer.cli.arguments.options import RAISING, Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.arguments.reproduction import names_same_source, remember, words_of
from quantizer.cli.modes import torchrun
from quantizer.cli.modes.gates import (
    Gate,
    failed_gates,
    never_measured_metrics,
    not_measured_by_targets,
    parse_gate,
    require_known_names,
    require_known_parts,
    require_measured,
    require_products,
)
from quantizer.cli.opening import session
from quantizer.cli.opening.evaluation import (
    evaluates_on_synthetic,
    evaluator_of,
    reads_calibration_data,
)
from quantizer.cli.opening.run_folder import report_place
from quantizer.cli.terminal.annotations import annotate_warnings
from quantizer.cli.terminal.follow import progress
from quantizer.cli.terminal.output import Outcome, metric_lines, show_layers, table_view
from quantizer.comparison.output_figures import POOLED_FIGURE
from quantizer.config.dpu_accuracy import require_calibrated_with
from quantizer.distributed import ALONE, Ranks, require_alike
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.compare import same_in_each_pass
from quantizer.evaluation.scores import Scores, score
from quantizer.export.targets import FOLDER, layer_choosing_option
from quantizer.graph.channels.output_parts import output_parts
from quantizer.graph.ir import Graph
from quantizer.report import tables
from quantizer.report.files import add_to_report, make_report, write_report
from quantizer.report.view import TableView
from quantizer.results.calibrated import Calibrated, reopen_calibration
from quantizer.results.calibrated_inputs import window_length
from quantizer.results.folder import QuantInfo, read_info
from quantizer.results.same_calibration import check_plan
from quantizer.sources.batches import Batch
from quantizer.sources.data import EXAMPLE_STAMP, Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate, LoadedModel
from quantizer.storage.files import write_text

if TYPE_CHECKING:
    from quantizer.export.layer_choice import LayerChoice

_logger = logging.getLogger(__name__)
_FAULT_HELP = "give that layer and those before it more bits or a wider range, or float"


def run_test(
    options: Options, ranks: Ranks = ALONE, opened: session.OpenedRun | None = None
) -> Outcome:
    """Compare the calibrated network with the float one and report.

    Args:
        options: of the run.
        ranks: the processes of the run.
        opened: the model and its calibration data, if they are open. An example input then
            takes the place of missing evaluation data, and the report says so.
    """
    folder = from_start(options.output_dir)
    info = read_info(folder)
    if options.exact:
        # Only --exact and --deploy need these
        from quantizer.cli.modes.exact_and_deploy import require_dpu

        require_dpu(info.settings.target_device)
    for name in RAISING:
        require_calibrated_with(f"--{name}", getattr(options, name), info.header.get(name))
    read: session.ReadConfig | None = None
    if options.config_file is not None:
        level = info.header.get("dpu_accuracy")
        read, _ = session.config_as_asked(options.config_file, level)
    loaded = session.open_model(options) if opened is None else opened.loaded
    evaluator = evaluator_of(options, loaded)
    gates = [parse_gate(text) for text in options.gate]
    if evaluator is None:
        require_known_names(gates, options)
        if loaded.evaluate is not None:
            _logger.warning(
                "evaluate() is not called: the data are synthetic. Give --eval_data, or "
                "evaluation_data() in the model's file, to measure the loss of the task"
            )
    seq_len = window_length(info.header["inputs"])
    if opened is not None and opened.batches.stands_in and not options.eval_data:
        batches = replace(opened.batches, stamp=EXAMPLE_STAMP)
    elif opened is not None and evaluates_on_synthetic(options, loaded):
        batches = opened.batches
    elif opened is not None and opened.evaluation is not None:
        batches = opened.evaluation
    else:
        batches = session.open_data(options, loaded, evaluation=True, seq_len=seq_len)
    if reads_calibration_data(options, loaded):
        command = info.commands.get("calib", ())
        passes = same_in_each_pass(batches)
        passes.has_same_source = names_same_source(options, command)
    with report_place(info, options, ranks) as (place, noted):
        original = session.recall_graph(options, loaded, batches, info)
        require_known_parts(gates, output_parts(original))
        noted["data"] = batches.filled and batches.filled.to_json()
        noted["stamp"] = batches.stamp
        if not ranks.is_alone:
            _require_alike(ranks, info, original)
        first = batches.first().to(session.device_of(options))
        calibrated = reopen_calibration(loaded.module, first, original, info)
        info = replace(info, solution=calibrated.solution)
        graph = calibrated.graph
        if read is not None:
            plan = session.resolved_plan(read, original, quiet=True, graph=graph)
            check_plan(info, read.config, plan)
        targets_of = first if evaluator is None else None
        _require_measurable(options, gates, info, graph, targets_of=targets_of)
        run = _TestRun(options, ranks, info, loaded, evaluator, gates, batches, place, noted)
        if opened is not None:
            run = replace(
                run, improvement=opened.improvement, float_metrics=opened.float_metrics
            )
        return run.outcome(calibrated)


@dataclass(frozen=True)
class _TestRun:
    """A test whose model, data and results are open and fit together."""

    options: Options
    ranks: Ranks
    info: QuantInfo
    loaded: LoadedModel
    evaluator: Evaluate | None
    gates: list[Gate]
    batches: Batches
    place: Path | None
    noted: dict[str, Any]
    improvement: str = ""
    float_metrics: Mapping[str, float] | None = None

    def outcome(self, calibrated: Calibrated) -> Outcome:
        """Run both networks, write the report, and export the targets of `--deploy`."""
        options = self.options
        graph = calibrated.graph
        layer_choice = self._layer_choice(calibrated)
        if layer_choice is not None:
            calibrated = calibrated.with_solution(layer_choice.solution)
        if options.deploy:
            # As in `run_test`
            from quantizer.export.exporting import as_run

            run_as = as_run(options.deploy, graph, calibrated.solution, options.target_choices)
            calibrated = calibrated.with_solution(run_as)
        scores = self._scores(calibrated)
        if not self.ranks.is_first:
            return Outcome(scores.metrics, {})
        outcome = self._report(scores, graph)
        annotate_warnings(options, outcome.report)
        if scores.fault:
            return replace(outcome, error=GateError(scores.fault, help=_FAULT_HELP))
        if options.exact:
            # As in `run_test`
            from quantizer.cli.modes.exact_and_deploy import run_exact

            outcome = run_exact(
                options, outcome, graph, self.info, batches=self.batches, place=self.place
            )
        if not options.deploy or failed_gates(self.gates, outcome.metrics):
            return self._with_late_figures(outcome)
        # As in `run_test`
        from quantizer.cli.modes.exact_and_deploy import deploy
        from quantizer.export.deployment import Deployment

        deployment = Deployment.of(
            calibrated,
            self.loaded.module,
            self.batches,
            scores.quantization,
            choices=options.target_choices,
            metrics=scores.metrics,
            warnings=scores.lost,
            layer_choice=layer_choice,
        )
        total = self.batches.total
        outcome = deploy(options, outcome, deployment, total, place=self.place)
        return self._with_late_figures(outcome)

    def _layer_choice(self, calibrated: Calibrated) -> LayerChoice | None:
        """Return which layers the file leaves in float for speed; None if it leaves none.

        Raises:
            UsageError: several processes would choose, or the machine is too busy to measure.
        """
        options = self.options
        choosing = layer_choosing_option(options.target_choices)
        if not choosing:
            return None
        if not self.ranks.is_alone:
            raise UsageError(f"{choosing} works in one process", help="run it without torchrun")
        # Few runs choose layers
        from quantizer.export.exporting import chosen_layers

        return chosen_layers(
            calibrated,
            self.loaded.module,
            self.batches,
            targets=options.deploy,
            choices=options.target_choices,
            folder=(self.place or from_start(options.output_dir)) / FOLDER,
        )

    def _with_late_figures(self, outcome: Outcome) -> Outcome:
        """Add the written files and the gates about `--exact` and `--deploy` to the report."""
        gates = dict(outcome.report["gates"])
        for gate in self.gates:
            if gate.metric in outcome.metrics:
                gates[gate.text] = gate.holds(outcome.metrics)
        added = {"gates": gates, "exports": list(outcome.exports)}
        is_complete = added.items() <= outcome.report.items()
        if self.place is None or is_complete:
            return outcome
        values = add_to_report(self.info, outcome.report, added, self.place)
        return replace(outcome, report=values)

    def _scores(self, calibrated: Calibrated) -> Scores:
        """Compare the networks on all batches, if there is enough memory for both."""
        graph = calibrated.graph
        options = self.options
        size = session.batch_size(options, self.batches)
        needed = memory_prediction.comparison_bytes(
            graph, self.info.solution.specs, size, self.batches.total or 1
        )
        memory_prediction.require_room("test mode", needed, memory_prediction.remedies(graph))

        def check(metrics: Collection[str]) -> None:
            directions = BY_NAME if self.evaluator is None else self.evaluator.directions
            require_known_names(self.gates, options, metrics, directions)

        return score(
            calibrated,
            self.loaded.module,
            self.batches,
            ForkedEvents(progress(quiet=options.quiet), torchrun.RankChecks(self.ranks)),
            function=self.evaluator,
            check=check,
            ranks=self.ranks,
            explained=not self.batches.stands_in,
            before=self.float_metrics,
        )

    def _report(self, scores: Scores, graph: Graph) -> Outcome:
        """Write the report, if there is a folder for it, and return the outcome."""
        options = self.options
        gates: dict[str, bool] = {}
        for gate in self.gates:
            if gate.metric in scores.gated:
                gates[gate.text] = gate.holds(scores.gated)
        view = table_view(options, graph)
        self.noted.update(_noted(scores))
        commands = {**self.info.commands, "test": words_of(options)}
        if self.place is not None:
            commands = remember(self.info, "test", words_of(options), self.place)
        return _report(
            view,
            self.info,
            scores,
            self.batches.stamp,
            gates=gates,
            place=self.place,
            commands=commands,
            improvement=self.improvement,
        )


def _require_alike(ranks: Ranks, info: QuantInfo, original: Graph) -> None:
    """Raise `RankError` if ranks have different results or models."""
    facts = {
        "results": info.files.identity,
        "layer": fingerprint.layer_digests(original),
        "weight": fingerprint.weight_digests(original),
    }
    require_alike(ranks, facts, "the calibrated model")


def _require_measurable(
    options: Options,
    gates: list[Gate],
    info: QuantInfo,
    graph: Graph,
    *,
    targets_of: Batch | None,
) -> None:
    """Raise `UsageError` if the options ask for something that this network does not allow.

    Args:
        options: of the run.
        gates: of the run.
        info: the results of calibration.
        graph: of the network.
        targets_of: a batch whose targets give the metrics; None if there is an evaluate().
    """
    if options.deploy:
        # As in `run_test`
        from quantizer.cli.modes.exact_and_deploy import require_one

        require_one(options, graph, info)
    if options.exact:
        # Only --exact needs it
        from quantizer.evaluation.exact import require_wide

        require_wide(graph, info.solution)
    if options.inspect:
        show_layers(options, graph, info.solution.tensors, {})
    require_measured(gates, never_measured_metrics(graph))
    require_products(gates, graph)
    if targets_of is not None:
        require_measured(gates, not_measured_by_targets(targets_of, graph))


def _noted(scores: Scores) -> dict[str, Any]:
    """Return the entries of run.json about a test."""
    passes = None if scores.passes is None else scores.passes.to_json()
    return {"passes": passes, "warnings": [warning.to_json() for warning in scores.warnings]}


def _report(
    view: TableView,
    info: QuantInfo,
    scores: Scores,
    stamp: str | None,
    *,
    gates: Mapping[str, bool],
    place: Path | None,
    commands: Mapping[str, list[str]],
    improvement: str,
) -> Outcome:
    """Write the results of the test, if there is a folder for them, and return what to
    show.
    """
    compared = scores.comparison
    rows = tables.layer_rows(compared, info.solution.specs)
    calibration_stamp = info.header.get("stamp")
    report = tables.report_values(scores, rows, stamp, calibration_stamp)
    if gates:
        report["gates"] = gates
    if improvement:
        report["improvement"] = improvement
    shown: list[RenderableType] = [tables.damage_table(rows, view)]
    if place is None:
        values, _ = make_report(info, report, commands)
    else:
        values = write_report(info, report, place, commands=commands)
        write_text(place / "layers.csv", tables.as_csv(rows))
        shown.append(f"results: {place}")
    if calibration_stamp:
        shown.append(f"note: calibrated on {calibration_stamp}")
    if scores.judged_on:
        shown.append(f"note: these figures were measured {scores.judged_on['text']}")
    if stamp:
        shown.append(f"note: these figures are of {stamp}")
    if scores.pairs:
        shown.append(tables.metric_table(scores.pairs))
    metrics = compared.metrics()
    if len(report["outputs"]) > 1:
        shown.append(tables.output_table(report["outputs"], view))
    else:
        # It equals the SQNR of the only part.
        metrics.pop(POOLED_FIGURE, None)
    shown += metric_lines(metrics)
    if scores.passes is not None:
        shown.append(scores.passes.line)
    return Outcome(scores.gated, report, shown, report=values)
