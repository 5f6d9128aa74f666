"""Runs `quantizer run` on the modules of a model that cannot be traced. Only weights are
quantized, and only files that need no graph are written. Holds what any run has done, for its
verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration import steps
from quantizer.calibration.events import Events, RunStage
from quantizer.calibration.module_target import ModuleTarget
from quantizer.calibration.request import CalibrationRequest
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.modes.calib_mode import with_remedy
from quantizer.cli.run_folder import log_run
from quantizer.cli.terminal.follow import progress, run_display
from quantizer.cli.terminal.output import Outcome, metric_lines
from quantizer.cli.terminal.render import say_note
from quantizer.commands.searching.tune import FinishedRun
from quantizer.comparison.output_comparison import require_same_shape
from quantizer.comparison.output_figures import OutputFigures, PartFigures, leaves
from quantizer.comparison.samples import SampleFinder
from quantizer.config.diagnostics import pointing_into
from quantizer.config.model import ResolvedConfig
from quantizer.config.roles import is_parameter
from quantizer.config.wording import counted
from quantizer.errors import (
    GateError,
    ModelError,
    UntraceableError,
    UsageError,
    VerificationError,
)
from quantizer.evaluation.compare import over_batches, record_predictions
from quantizer.evaluation.network_comparison import NetworkComparison, in_pairs
from quantizer.evaluation.output_warnings import sample_warnings
from quantizer.evaluation.scores import (
    Scores,
    judged_on,
    log_warnings,
    measure,
    same_in_each_pass,
)
from quantizer.export.agreement import Verification
from quantizer.export.destinations import DESTINATIONS
from quantizer.export.exporting import export_modules, export_summary, figures_of_file
from quantizer.export.gates import (
    Gate,
    failed_gates,
    held_gates,
    require_known,
    require_known_names,
)
from quantizer.export.refusals import planned_refusals, refuse
from quantizer.export.saved_modules import save_verified
from quantizer.export.targets import EXPORTERS, FOLDER, checked_target
from quantizer.graph.modules import Untraced, uncovered_modules
from quantizer.graph.output_names import leaf_names, plain_output
from quantizer.graph.tracing.parameters import replace_parameters
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.report import tables
from quantizer.results.result_set import locked
from quantizer.results.write import check_owner
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate
from quantizer.sources.module_state import evaluating, without_cache
from quantizer.sources.tensor_kinds import check_kinds
from quantizer.sources.user_code import user_errors
from quantizer.storage.deferred_tensor import DeferredTensor


@dataclass(frozen=True)
class ModulePair:
    """A float model and the same model with quantized modules, on one device."""

    reference: nn.Module
    quantized: nn.Module
    device: torch.device

    def scores(
        self,
        batches: Batches,
        events: Events,
        *,
        function: Evaluate | None,
        check: Callable[[Collection[str]], None],
    ) -> Scores:
        """Run both models on all batches. Nothing is known of their layers.

        Args:
            batches: of evaluation data.
            events: progress is reported there.
            function: the user's `evaluate(model, data)`; None for the metrics of targets.
            check: called with the names of the user's metrics before the models are compared.

        Raises:
            DataError: no batch, or an output of the float model is not finite.
            ModelError: the outputs have other shapes.
        """
        measured = partial(
            measure, batches=batches, device=self.device, events=events, function=function
        )
        before: Mapping[str, float] = {}
        same_in_each_pass(batches)
        if function is not None:
            before = measured(self.reference, label="evaluate float")
            check(before.keys())
        comparison = NetworkComparison([])
        samples = SampleFinder(lambda batch: list(outputs_of(self.reference, batch).values()))
        names = batches.arguments.names
        marked = (batch.with_included(names) for batch in batches)
        with RunStage(events, "test", batches.total) as stage:
            over_batches(
                stage.counted(self.moved(marked)),
                lambda number, batch: self._add(comparison, number, batch, samples),
            )
        warnings = tuple(sample_warnings(leaves(comparison.outputs)))
        log_warnings(warnings)
        pairs, directions = comparison.pairs(), BY_NAME
        if function is not None:
            pairs = in_pairs(before, measured(self.quantized, label="evaluate quantized"))
            directions = function.directions
        return Scores(comparison, pairs, directions, None, warnings, judged_on(batches))

    def moved(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Return batches on the device of the models."""
        return (batch.to(self.device) for batch in batches)

    def _add(
        self, comparison: NetworkComparison, number: int, batch: Batch, samples: SampleFinder
    ) -> None:
        """Run both models on a batch, and add what it shows to the comparison."""
        with prefix_batch_errors(number, batch):
            reference = outputs_of(self.reference, batch)
            quantized = outputs_of(self.quantized, batch)
            names = list(reference)
            known = names
            if comparison.batches:
                known = [figures.whole.name for figures in comparison.outputs]
            if list(quantized) != names or known != names:
                raise ModelError(
                    "the model returns other outputs for other values: nothing can be compared",
                    help="return the same outputs from forward() for all batches",
                )
            result = NetworkComparison([], outputs=_empty(names))
            for index, (figures, x) in enumerate(
                zip(result.outputs, reference.values(), strict=True)
            ):
                y = quantized[figures.whole.name]
                require_same_shape(figures.whole.name, x, y)
                rows = samples.rows(index, x, 0, batch)
                mask = batch.included
                # The second of two axes may be one of features
                has_positions = x.dim() > 2
                if has_positions and mask is not None and x.shape[:2] == mask.shape:
                    tokens = mask.to(x.device)
                    x = x[tokens].unsqueeze(0)
                    y = y[tokens].unsqueeze(0)
                    rows = None if rows is None else rows.of_tokens(mask)
                figures.whole.add(x, y, rows=rows)
            record_predictions(
                result, batch, list(reference.values()), list(quantized.values())
            )
            if not comparison.batches:
                comparison.outputs = _empty(names)
            comparison.merge(result)


def _empty(names: Sequence[str]) -> list[OutputFigures]:
    """Return the figures of outputs without a batch."""
    return [OutputFigures(PartFigures(name)) for name in names]


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the tensors that a model gives for a batch, by name.

    Raises:
        ModelError: the model fails.
    """
    with user_errors("running the model", ModelError):
        output = plain_output(model(*batch.args, **batch.kwargs))
    leaves = pytree.tree_leaves(output)
    tensors = {}
    for name, leaf in zip(leaf_names(output), leaves, strict=True):
        if isinstance(leaf, Tensor):
            tensors[name] = leaf
    return tensors


_SUFFIX = "-modules"
_FAULT_HELP = "leave the layers that matter most in float: add them to exclude"


def require_weights_only(
    model: nn.Module, config: ResolvedConfig, error: UntraceableError
) -> None:
    """Check that a config can be applied to single modules without data.

    Args:
        model: in float.
        config: of the run.
        error: why the model cannot be traced.

    Raises:
        UntraceableError: the config quantizes more than weights, or has algorithms.
    """
    if config.algorithms:
        raise with_remedy(error, f"{config.algorithms[0].name} works on a trace")
    target = ModuleTarget.of(model)
    try:
        target.prepared(config)
    except UsageError as refusal:
        raise with_remedy(error, refusal.message) from refusal
    for tensor in target.plan(config).tensors.values():
        if not is_parameter(tensor.role):
            reason = f"the config quantizes the {tensor.role} of {tensor.layer}"
            raise with_remedy(error, reason)


@dataclass(frozen=True)
class RunOnModules:
    """A run whose model cannot be traced.

    Args:
        options: of the run, with its config.
        opened: the model and its data.
        gates: of the run.
        destination: what its user calls the target.
        target: of `--deploy`.
        error: why the model cannot be traced.
    """

    options: Options
    opened: session.OpenedRun
    gates: Sequence[Gate]
    destination: str
    target: str
    error: UntraceableError

    def run(self) -> FinishedRun:
        """Quantize, test and write.

        Raises:
            UntraceableError: the config quantizes more than weights, or rounds them with data.
            QuantizerError: a step failed, or there is no metric of a gate.
        """
        options = self.options
        model = self.opened.loaded.module
        evaluator = session.evaluator_of(options, self.opened.loaded)
        if evaluator is None:
            require_known_names(self.gates, options.deploy)
        read = session.read_config_file(options.config_file)
        require_weights_only(model, read.config, self.error)
        stored = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DeferredTensor):
                stored[name] = parameter.load()
        replace_parameters(model, stored)
        tensors = (*model.parameters(), *model.buffers())
        float_bytes = sum(tensor.nbytes for tensor in tensors)
        with user_errors("copying the model", ModelError):
            quantized = copy.deepcopy(model)
        target = ModuleTarget.of(quantized)
        check_kinds(quantized)
        folder = from_start(options.output_dir)
        with locked(folder), log_run(folder, options) as noted:
            check_owner(folder, self.opened.loaded.name, overwrite=options.overwrite)
            say_note(
                "note: layers with weights are quantized as modules, to nearest, without "
                "generated code, figures by layer and a report, as "
                f"{self.error.message.rstrip(':')}"
            )
            with pointing_into(read.sources):
                plan = self._quantized(target, read.config, read.sources)
            pair = ModulePair(model, quantized, session.device_of(options))
            with evaluating(quantized), without_cache(model), without_cache(quantized):
                tested = self._tested(pair, plan, folder)
            noted["untraceable"] = self.error.message
            noted["tested"] = tested.report
        content = {"tensors": len(plan.tensors), "untraceable": self.error.message}
        line = f"{counted(len(plan.tensors), 'tensor')} quantized without data"
        calibrated = Outcome({}, content, [line], plan=plan)
        opened = replace(
            self.opened,
            improvement=f"change {self.opened.loaded.name} so that torch.export can trace it. "
            "Until then there is no GPTQ, no quantized activation and no figure of a layer.",
        )
        left_float = {}
        for path, kind in uncovered_modules(model, plan.graph).items():
            left_float[path] = f"there are no quantization rules for {kind}"
        other_bytes = max(float_bytes - weight_bytes(plan)[0], 0)
        untraced = Untraced(other_bytes, left_float)
        test_options = replace(options, quant_mode="test", deploy=(self.target,))
        return FinishedRun(
            self.destination,
            test_options,
            opened,
            calibrated,
            tested,
            self.gates,
            untraced=untraced,
            remedy="`exclude` in the config leaves layers in float",
        )

    def _quantized(
        self, target: ModuleTarget, config: ResolvedConfig, sources: dict[str, str]
    ) -> Plan:
        """Quantize the modules of the target, and return their plan."""
        request = CalibrationRequest(
            target=target,
            config=config,
            batches=self.opened.batches,
            events=run_display(sources, quiet=self.options.quiet),
            seed=self.options.seed,
            confirm=lambda _, state: target.check(state.plan),
        )
        return steps.run_calibration(request).plan

    def _tested(self, pair: ModulePair, plan: Plan, folder: Path) -> Outcome:
        """Compare the models, and write the file if all gates hold."""
        options = self.options
        batches = session.open_test_data(options, self.opened.loaded, self.opened)
        evaluator = session.evaluator_of(options, self.opened.loaded)

        def check(metrics: Collection[str]) -> None:
            directions = BY_NAME if evaluator is None else evaluator.directions
            require_known_names(self.gates, options.deploy, metrics, directions)

        events = progress(quiet=options.quiet)
        scores = pair.scores(batches, events, function=evaluator, check=check)
        report = tables.report_values(scores, [], batches.stamp)
        if self.gates:
            report["gates"] = held_gates(self.gates, scores.gated)
        lines: list[RenderableType] = metric_lines(scores.comparison.metrics())
        tested = Outcome(scores.gated, report, lines, report=report)
        about_outputs = [gate for gate in self.gates if gate.is_of_outputs]
        require_known(about_outputs, scores.gated)
        if scores.fault:
            return replace(tested, error=GateError(scores.fault, help=_FAULT_HELP))
        if failed_gates(self.gates, tested.metrics):
            return tested
        path, verified = self._written(pair, plan, batches, folder / FOLDER)
        is_state = path.name.endswith(_SUFFIX)
        target = DESTINATIONS[self.destination].target if is_state else self.target
        report["exports"] = [export_summary(target, path, verified)]
        of_file = figures_of_file(target, verified, report["exports"][0]["bytes"])
        if self.gates:
            report["gates"] |= held_gates(self.gates, of_file)
        return replace(
            tested,
            metrics={**tested.metrics, **of_file},
            content={**report, "deployed": {path.name: verified.to_json()}},
            deployed={path: verified},
            exports=report["exports"],
        )

    def _written(
        self, pair: ModulePair, plan: Plan, batches: Batches, folder: Path
    ) -> tuple[Path, Verification]:
        """Write a checkpoint, or the state of the modules where that cannot be one.

        Raises:
            VerificationError: the model gives other outputs for equal inputs.
            ResultError: the folder cannot be written.
        """
        name = type(pair.reference).__name__
        remarks: tuple[str, ...] = ()
        if EXPORTERS[self.target].modules_exporter:
            checked = checked_target(self.target, self.options.target_choices)
            path = folder / f"{name}{EXPORTERS[self.target].suffix}"
            try:
                refuse(checked.words, planned_refusals(checked, plan))
                return path, export_modules(pair.quantized, path, pair.moved(batches))
            except (UsageError, VerificationError) as refusal:
                remarks = (
                    f"{refusal.message}: the state of the modules is written instead, which "
                    "ModelQuantizer.load reads",
                )
                say_note(f"note: {remarks[0]}")
        path = folder / f"{name}{_SUFFIX}"
        verified = save_verified(pair.quantized, pair.reference, path, pair.moved(batches))
        return path, replace(verified, remarks=remarks)
