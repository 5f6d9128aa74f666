"""Runs `quantizer run` on the modules of a model that cannot be traced: only weights are
quantized, and only files that need no graph are written. Holds what any run has done,
for its verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import RenderableType
from torch import nn

from quantizer.calibration import steps
from quantizer.calibration.module_target import ModuleTarget
from quantizer.calibration.request import CalibrationRequest
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.arguments.places import from_start
from quantizer.cli.modes.calib_mode import with_remedy
from quantizer.cli.modes.gates import (
    Gate,
    failed_gates,
    gate_lines,
    held_gates,
    require_known,
    require_known_names,
)
from quantizer.cli.run_folder import data_options, log_run
from quantizer.cli.terminal.follow import progress, run_display
from quantizer.cli.terminal.output import Outcome, metric_lines
from quantizer.cli.terminal.render import say_note
from quantizer.commands.run.module_scores import ModulePair
from quantizer.commands.searching.divided_data import DividedData
from quantizer.commands.searching.tuned_run import TunedRun
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
from quantizer.export.agreement import Verification
from quantizer.export.exporting import export_modules, export_summary
from quantizer.export.refusals import planned_refusals, refuse
from quantizer.export.saved_modules import save_verified
from quantizer.export.targets import EXPORTERS, FOLDER, checked_target
from quantizer.graph.modules import uncovered_modules
from quantizer.graph.tracing.parameters import replace_parameters
from quantizer.graph.tracing.untraced import Untraced
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.report import tables
from quantizer.report.verdict import VerdictFacts
from quantizer.results.result_set import locked
from quantizer.results.write import check_owner
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.module_state import evaluating, without_cache
from quantizer.sources.tensor_kinds import check_kinds
from quantizer.sources.user_code import user_errors
from quantizer.storage.deferred_tensor import DeferredTensor

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


def _load_values(model: nn.Module) -> None:
    """Read the parameters of a model that are still in their files."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DeferredTensor):
            tensors[name] = parameter.load()
    replace_parameters(model, tensors)


@dataclass(frozen=True)
class RunOnModules:
    """A run whose model cannot be traced.

    Args:
        options: of the run, with its config.
        opened: the model and its data.
        gates: of the run.
        destination: what its user calls the target.
        target: of `--deploy`.
        state_target: that of a file with the state of the modules.
        error: why the model cannot be traced.
    """

    options: Options
    opened: session.OpenedRun
    gates: Sequence[Gate]
    destination: str
    target: str
    state_target: str
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
            require_known_names(self.gates, options)
        read = session.read_config_file(options.config_file)
        require_weights_only(model, read.config, self.error)
        _load_values(model)
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
            require_known_names(self.gates, options, metrics, directions)

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
        target = self.state_target if is_state else self.target
        report["exports"] = [export_summary(target, path, verified)]
        return replace(
            tested,
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


@dataclass(frozen=True)
class FinishedRun:
    """A run after its last step.

    Attributes:
        destination: what its user calls the target.
        test_options: the options of its test.
        opened: the model and its data.
        calibrated, tested: the results of both modes.
        data: that calibrate and judge; None on modules, whose weights need no data.
        tuning: the search for a better config, if there was one.
        remedy: what to do if a gate does not hold; empty to name the page of the report.
        untraced: what the file holds besides the layers of the plan.
    """

    destination: str
    test_options: Options
    opened: session.OpenedRun
    calibrated: Outcome
    tested: Outcome
    data: DividedData | None = None
    tuning: TunedRun | None = None
    remedy: str = ""
    untraced: Untraced = field(default_factory=Untraced)

    def facts(self, gates: Sequence[Gate]) -> VerdictFacts:
        """Return what the verdict is about."""
        tested = self.tested
        options = self.test_options
        assert self.calibrated.plan is not None
        path: str | None = None
        size = 0
        verified: Verification | None = None
        for written, verification in tested.deployed.items():
            verified = verification
            path = str(written)
            size = tested.exports[-1]["bytes"]
        of_data = options
        if self.data is not None:
            # As the page joins the options of both modes
            calibrated_samples = self.data.calib_options.subset_len
            of_data = replace(options, subset_len=calibrated_samples)
        return VerdictFacts.of(
            self.calibrated.plan,
            verified,
            untraced=self.untraced,
            path=path,
            size=size,
            tested=tested.report,
            config=options.config_file or "",
            model_option=options.model or "",
            data_options=data_options(of_data),
            gates=gate_lines(gates, tested.metrics),
            not_met=failed_gates(gates, tested.metrics),
            improvement=self.opened.improvement,
        )
