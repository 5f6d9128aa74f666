"""Runs `--quant_mode test`: compares the calibrated network with the float one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from quantizer.calibration import fingerprint, memory_prediction
from quantizer.calibration.events import ForkedEvents, RankChecks
from quantizer.cli import session
from quantizer.cli.arguments.options import RAISING, Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.run_folder import names_same_source, remember, report_place, words_of
from quantizer.cli.terminal.follow import progress
from quantizer.cli.terminal.output import (
    Outcome,
    annotate,
    metric_lines,
    show_layers,
    table_view,
)
from quantizer.config.run_options import require_calibrated_with
from quantizer.distributed import ALONE, Ranks, require_alike
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.scores import Scores, same_in_each_pass, score
from quantizer.export.targets import FOLDER, layer_choosing_option
from quantizer.graph.ir import Graph
from quantizer.report import tables
from quantizer.report.content import add_to_report, make_report, write_report
from quantizer.results.calibrated import Calibrated, check_plan, reopen_calibration
from quantizer.results.folder import QuantInfo, read_info
from quantizer.sources.arguments import window_length
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate, LoadedModel
from quantizer.storage.files import write_text
from quantizer.tables import POOLED_METRICS

if TYPE_CHECKING:
    from quantizer.export.gates import Gate
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
        # Only --exact and --to need these
        from quantizer.cli.modes.exact_and_deploy import require_dpu

        require_dpu(info.settings.target_device)
    for name in RAISING:
        require_calibrated_with(f"--{name}", getattr(options, name), info.header.get(name))
    read: session.ReadConfig | None = None
    if options.config_file is not None:
        level = info.header.get("dpu_accuracy")
        read, _ = session.config_as_asked(options.config_file, level)
    loaded = session.open_model(options) if opened is None else opened.loaded
    options = session.with_targets(options, loaded.module)
    evaluator = session.evaluator_of(options, loaded)
    if evaluator is None and loaded.evaluate is not None:
        _logger.warning(
            "evaluate() is not called: the data are synthetic. Give --eval_data, or "
            "evaluation_data() in the model's file, to measure the loss of the task"
        )
    gates = _parsed_gates(options, has_evaluate=evaluator is not None)
    seq_len = window_length(info.header["inputs"])
    batches = session.open_test_data(options, loaded, opened, seq_len)
    if reads_calibration_data(options, loaded):
        command = info.commands.get("calib", ())
        passes = same_in_each_pass(batches)
        passes.has_same_source = names_same_source(options, command)
    with report_place(info, options, ranks) as (place, noted):
        original = session.recall_graph(options, loaded, batches, info)
        if gates:
            # As in `_parsed_gates`
            from quantizer.export.gates import require_known_parts

            require_known_parts(gates, original)
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
        _require_measurable(options, info, graph)
        if gates:
            # As in `_parsed_gates`
            from quantizer.export.gates import require_measurable

            require_measurable(gates, graph, first, has_evaluate=evaluator is not None)
        opened = opened or session.OpenedRun(options, loaded, batches)
        run = _TestRun(options, ranks, info, opened, evaluator, gates, batches, place, noted)
        return run.outcome(calibrated)


def reads_calibration_data(options: Options, loaded: LoadedModel) -> bool:
    """Return whether tests read from where calibrations with these options read."""
    option = session.evaluation_option(options, loaded)
    if option is None and options.data is None:
        return loaded.evaluation_data is loaded.calibration_data
    return option == options.data


def _parsed_gates(options: Options, *, has_evaluate: bool) -> list[Gate]:
    """Return the gates of a test. Those about metrics that only an `evaluate` returns are
    refused without one.
    """
    if not options.gate:
        return []
    # Few tests have gates
    from quantizer.export.gates import parse_gate, require_known_names

    gates = [parse_gate(text) for text in options.gate]
    if not has_evaluate:
        require_known_names(gates, options.deploy, exact=options.exact)
    return gates


@dataclass(frozen=True)
class _TestRun:
    """A test whose model, data and results are open and fit together."""

    options: Options
    ranks: Ranks
    info: QuantInfo
    opened: session.OpenedRun
    evaluator: Evaluate | None
    gates: list[Gate]
    batches: Batches
    place: Path | None
    noted: dict[str, Any]

    def outcome(self, calibrated: Calibrated) -> Outcome:
        """Run both networks, write the report, and export."""
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
        annotate(options, (), outcome.report)
        if scores.fault:
            return replace(outcome, error=GateError(scores.fault, help=_FAULT_HELP))
        if options.exact:
            # As in `run_test`
            from quantizer.cli.modes.exact_and_deploy import run_exact

            outcome = run_exact(
                options, outcome, graph, self.info, batches=self.batches, place=self.place
            )
        if not options.deploy or not all(self._held_gates(outcome.metrics).values()):
            return self._with_late_figures(outcome)
        # As in `run_test`
        from quantizer.cli.modes.exact_and_deploy import deploy
        from quantizer.export.deployment import Deployment

        deployment = Deployment.of(
            calibrated,
            self.opened.loaded.module,
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
            self.opened.loaded.module,
            self.batches,
            targets=options.deploy,
            choices=options.target_choices,
            folder=(self.place or from_start(options.output_dir)) / FOLDER,
        )

    def _held_gates(self, metrics: Mapping[str, float]) -> dict[str, bool]:
        """Return whether each gate holds, by its text, of those about `metrics`."""
        if not self.gates:
            return {}
        # As in `run_test`
        from quantizer.export.gates import held_gates

        return held_gates(self.gates, metrics)

    def _with_late_figures(self, outcome: Outcome) -> Outcome:
        """Add to the report the written files, and the gates about them and `--exact`."""
        # A gate that was not measured does not hold
        gates = {gate.text: False for gate in self.gates} | self._held_gates(outcome.metrics)
        added: dict[str, Any] = {"gates": gates, "exports": list(outcome.exports)}
        if outcome.error is not None:
            added["fault"] = str(outcome.error).partition("\n")[0]
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
            if not self.gates:
                return
            # As in `run_test`
            from quantizer.export.gates import require_known_names

            directions = BY_NAME if self.evaluator is None else self.evaluator.directions
            require_known_names(
                self.gates, options.deploy, metrics, directions, exact=options.exact
            )

        return score(
            calibrated,
            self.opened.loaded.module,
            self.batches,
            ForkedEvents(progress(quiet=options.quiet), RankChecks(self.ranks)),
            function=self.evaluator,
            check=check,
            ranks=self.ranks,
            explained=not self.batches.stands_in,
            before=self.opened.float_metrics,
        )

    def _report(self, scores: Scores, graph: Graph) -> Outcome:
        """Write the report, if there is a folder for it, and return the outcome."""
        info = self.info
        place = self.place
        stamp = self.batches.stamp
        compared = scores.comparison
        view = table_view(self.options, graph)
        passes = scores.passes
        self.noted["passes"] = passes and passes.to_json()
        self.noted["warnings"] = [warning.to_json() for warning in scores.warnings]
        rows = tables.layer_rows(compared, info.solution.specs)
        calibration_stamp = info.header.get("stamp")
        report = tables.report_values(scores, rows, stamp, calibration_stamp)
        gates = self._held_gates(scores.gated)
        if gates:
            report["gates"] = gates
        if scores.fault:
            report["fault"] = scores.fault
        if self.opened.improvement:
            report["improvement"] = self.opened.improvement
        shown: list[RenderableType] = [tables.damage_table(rows, view)]
        if rows:
            shown.append(f"quantized as {tables.usual_text(tables.usual_specs(rows))}")
        words = words_of(self.options)
        if place is None:
            values, _ = make_report(info, report, {**info.commands, "test": words})
        else:
            commands = remember(info, "test", words, place)
            values = write_report(info, report, place, commands=commands)
            write_text(place / "layers.csv", tables.as_csv(rows))
            shown.append(f"results: {place}")
        if scores.pairs:
            shown.append(tables.metric_table(scores.pairs))
        metrics = compared.metrics()
        if len(report["outputs"]) > 1:
            shown.append(tables.output_table(report["outputs"], view))
        else:
            # They equal the figures of the only part
            for name in POOLED_METRICS:
                metrics.pop(name, None)
        shown += metric_lines(metrics)
        if passes is not None:
            shown.append(passes.line)
        return Outcome(scores.gated, report, shown, report=values)


def _require_alike(ranks: Ranks, info: QuantInfo, original: Graph) -> None:
    """Raise `RankError` if ranks have different results or models."""
    facts = {
        "results": info.files.identity,
        "layer": fingerprint.layer_digests(original),
        "weight": fingerprint.weight_digests(original),
    }
    require_alike(ranks, facts, "the calibrated model")


def _require_measurable(options: Options, info: QuantInfo, graph: Graph) -> None:
    """Raise `UsageError` if the options ask for something that this network does not allow."""
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
