"""Defines the results of `calibrate` and `load`, a quantized network that can be tested, saved
and exported, and of `quantize`.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import nn

from quantizer.api.comparison import Comparison, Report
from quantizer.api.config import path_of
from quantizer.api.display import called_from_python, html_table, in_python
from quantizer.calibration.events import Events
from quantizer.config.wording import counted
from quantizer.errors import DataError, UsageError
from quantizer.evaluation.scores import score
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import exporter_of, require_place
from quantizer.export.exporting import chosen_layers, export
from quantizer.export.layer_choice import LayerChoice
from quantizer.export.refusals import require_expressible, require_extras
from quantizer.export.targets import (
    CHECKED_TARGETS,
    EXPORTERS,
    checked_choices,
    checked_target,
    layer_choosing_option,
)
from quantizer.plan.model import Plan
from quantizer.plan.remarks import left_parameters, share_left
from quantizer.plan.size import weight_bytes
from quantizer.plugins import remedy_for_absent
from quantizer.printable import element
from quantizer.report import tables
from quantizer.report.content import write_report
from quantizer.report.view import TableView
from quantizer.results.calibrated import Calibrated
from quantizer.results.folder import OpenedResults, open_written
from quantizer.results.result_set import locked
from quantizer.results.write import check_owner, write_copy
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.directions import Directions
from quantizer.sources.models import Evaluate, checked_measure
from quantizer.sources.module_state import evaluating
from quantizer.storage.permission import replacing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from quantizer import ExportOptions, ExportTarget


class PlanView:
    """A plan that a notebook shows as a table.

    Attributes:
        plan: the decisions themselves, a `quantizer.plan.model.Plan`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        return self.plan.to_json()

    def __repr__(self) -> str:
        return f"{self.plan!r}\n{_summary(self.plan)}"

    def _repr_html_(self) -> str:
        rules = html_table(tables.rule_table(self.plan, TableView()))
        return rules + html_table(tables.plan_table(self.plan, TableView()))


class Result:
    """Holds a calibrated model, to test, save and export.

    Attributes:
        plan: the decisions for each tensor; a notebook shows them as a table.
    """

    def __init__(
        self,
        model: nn.Module,
        calibrated: Calibrated,
        plan: Plan,
        batches: Batches,
        *,
        events: Events,
        write: Callable[[Path], None] | None = None,
        opened: OpenedResults | None = None,
        layer_choice: LayerChoice | None = None,
        calibration_stamp: str | None = None,
    ) -> None:
        self.plan = PlanView(plan)
        self._model = model
        self._calibrated = calibrated
        self._batches = batches
        self._events = events
        self._write = write
        self._opened = opened
        self._layer_choice = layer_choice
        self._calibration_stamp = calibration_stamp

    @cached_property
    def network(self) -> nn.Module:
        """Return the quantized network. It is called like the model, and its outputs are
        bit-identical to those of test mode without `--deploy`.
        """
        return self._calibrated.network()

    @called_from_python()
    def test(
        self,
        data: Any = None,
        evaluate: Callable[[Callable[..., Any], Iterable[Any]], dict[str, float]] | None = None,
        *,
        lower_is_better: Collection[str] = (),
        higher_is_better: Collection[str] = (),
    ) -> Comparison:
        """Run the quantized and the float network on the same batches.

        Args:
            data: as in `calibrate`; None for the data of `calibrate` or `load`.
            evaluate: `evaluate(model, data)` returns a dict of metrics. Without it, top-1
                accuracy or perplexity is measured if the data has targets.
            lower_is_better: the metrics of `evaluate` of which less is better, if their names
                do not show it.
            higher_is_better: the metrics of which more is better.

        Raises:
            DataError: there are no batches, or outputs are not finite.
            UsageError: a metric is declared as both.
        """
        directions = Directions.of(lower_is_better, higher_is_better)
        function: Evaluate | None = None
        if evaluate is not None:
            function = Evaluate(checked_measure(evaluate, "evaluate"), directions)
        batches = self._batches_of(data)
        require_real(batches, evaluate)
        with evaluating(self._model):
            scores = score(
                self._calibrated,
                self._model,
                batches,
                self._events,
                function=function,
                explained=True,
            )
        return Comparison(
            scores, self._calibrated, batches.stamp, calibration_stamp=self._calibration_stamp
        )

    @called_from_python()
    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the result folder.

        Its files are equal to those that the command line writes, byte for byte. Only run.json,
        run.log and the commands in reports are missing.

        Args:
            folder: the folder to write to.
            overwrite: whether results of another model, and files that were changed, are
                replaced.

        Raises:
            ResultError: the folder cannot be written, is in use, or holds results of another
                model.
            UsageError: the folder holds other files than results.
        """
        place = path_of(folder, "folder")
        with replacing(overwrite=overwrite), locked(place):
            check_owner(place, self._calibrated.graph.model, overwrite=overwrite)
            if self._write is not None:
                self._write(place)
            elif self._opened is not None and not self._is_in(place):
                write_copy(place, self._opened)
            write_report(open_written(place))

    def _is_in(self, place: Path) -> bool:
        """Return whether the folder is the one that was loaded and has not changed since."""
        opened = self._opened
        if opened is None or opened.folder.resolve() != place.resolve():
            return False
        return opened.files.is_current()

    @called_from_python()
    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        tested: Comparison | None = None,
        *,
        overwrite: bool = False,
    ) -> Report:
        """Return the report of this calibration, and of a test of it.

        Args:
            path: the file to which the page is also written; None to write no file.
            tested: the result of `test`, which adds the figures of the test.
            overwrite: whether a file that exists is replaced.

        Raises:
            UsageError: the file exists.
            ResultError: it cannot be written.
        """
        with TemporaryDirectory() as place:
            if self._write is not None:
                self._write(Path(place))
            opened = self._opened or open_written(Path(place))
            values = tested.to_json() if tested else {}
            report = Report(opened, values)
        if path is not None:
            report.save(path, overwrite=overwrite)
        return report

    @called_from_python()
    def export(
        self,
        target: "ExportTarget | str",
        path: str | os.PathLike[str],
        data: Any = None,
        *,
        overwrite: bool = False,
        **options: "Unpack[ExportOptions]",
    ) -> Verification:
        """Write the network for another runtime and verify the file.

        Args:
            target: a value of `--deploy`, such as "onnx". Editors list all of them, and all
                options.
            path: the file or folder to write. Some targets write several files.
            data: the data to verify it with, as in `test`.
            overwrite: whether files that exist are replaced.
            options: the options of the target, by the names of the command line's options
                without dashes, such as `onnx_weights="int8"`.

        Raises:
            DataError: there is no data.
            UsageError: there is no such target or option, packages are missing, the target
                cannot express the config, or the path exists.
            VerificationError: the outputs of the file differ from test mode; it is not written.
        """
        with replacing(overwrite=overwrite):
            verification = verified_file(self, data, target=target, path=path, options=options)
        reworded: Verification = in_python(verification)
        return reworded

    def _batches_of(self, data: Any) -> Batches:
        """Return the batches of `data`, or those of `calibrate` or `load` if it is None."""
        if data is not None:
            return load_batches(data, module=self._model, label="data")
        if self._batches.stands_in:
            raise DataError("there is no data", help="give it here or to `load`")
        return self._batches

    def _title(self) -> str:
        tensors = counted(len(self._calibrated.solution.tensors), "tensor")
        return f"Result({tensors} of {self._calibrated.graph.model} quantized)"

    def __repr__(self) -> str:
        return f"{self._title()}\n{_summary(self.plan.plan)}"

    def _repr_html_(self) -> str:
        return element("p", self._title()) + self.plan._repr_html_()


@dataclass(frozen=True, repr=False)
class Quantized:
    """Holds what `quantize` returns. Its text is the verdict.

    Attributes:
        path: the written file or folder.
        folder: the folder with config, results and report.
        result: the calibrated model, to test and export further.
        comparison: the comparison of the quantized network with the float one.
        verification: the comparison of the written file with test mode.
        verdict: at most eight lines in plain words.

    >>> import tempfile, torch, quantizer
    >>> batches = [torch.linspace(-1, 1, 32).view(4, 8)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     quantizer.quantize(torch.nn.Linear(8, 4), batches, "pt2", folder=folder).path.name
    'Linear.pt2'
    """

    path: Path
    folder: Path
    result: Result
    comparison: Comparison
    verification: Verification
    verdict: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.verdict)

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(line)}</p>" for line in self.verdict)


def require_real(batches: Batches, evaluate: Any, data: Any = None) -> None:
    """Raise `UsageError` if metrics of the task would be measured on synthetic data.

    Args:
        batches: of the calibration.
        evaluate: the user's function; None to measure no metric.
        data: to test with; None for those of the calibration.
    """
    if batches.way and evaluate is not None and data is None:
        raise UsageError(
            "evaluate() needs real data: metrics on synthetic data mean nothing",
            help="give data to test with, or leave out evaluate",
        )


def verified_file(
    result: Result,
    data: Any,
    *,
    target: str,
    path: str | os.PathLike[str],
    options: Mapping[str, object],
) -> Verification:
    """Write the file of a result, and return its verification in the words of the shell.

    The arguments are those of `Result.export`.
    """
    if target not in EXPORTERS:
        remedy = f"known are {', '.join(EXPORTERS)}; {remedy_for_absent(target)}"
        if target in CHECKED_TARGETS:
            remedy = f"give {CHECKED_TARGETS[target].words.marked}"
        raise UsageError(f"there is no export target {target!r}", help=remedy)
    file = path_of(path)
    choices = checked_choices(options, target, Result.export)
    require_extras([target])
    require_place(exporter_of(target, choices), file)
    require_expressible(
        checked_target(target, choices),
        result._calibrated.graph,
        result._calibrated.solution.specs,
        result._calibrated.settings.onnx_opset_version,
    )
    result = result_for_file(result, data, target=target, file=file, choices=choices)
    calibrated = result._calibrated
    batches = result._batches_of(data)
    scores = score(calibrated, result._model, batches, result._events, explained=True)
    deployment = Deployment.of(
        calibrated,
        result._model,
        batches,
        scores.quantization,
        choices=choices,
        metrics=scores.metrics,
        warnings=scores.lost,
        layer_choice=result._layer_choice,
    )
    return export(target, deployment, file, result._events, total=batches.total)


def result_for_file(
    result: Result, data: Any, *, target: str, file: Path, choices: Mapping[str, str]
) -> Result:
    """Return the result that a file will hold: the same, or with some layers in float.

    Args:
        result: of calibration.
        data: as in `Result.export`.
        target: of the file.
        file: its path.
        choices: values of the target's options, by name.
    """
    if result._layer_choice is not None or not layer_choosing_option(choices):
        return result
    choice = chosen_layers(
        result._calibrated,
        result._model,
        result._batches_of(data),
        targets=[target],
        choices=choices,
        folder=file.parent,
    )
    assert choice is not None
    return Result(
        result._model,
        result._calibrated.with_solution(choice.solution),
        result.plan.plan,
        result._batches,
        events=result._events,
        layer_choice=choice,
        calibration_stamp=result._calibration_stamp,
    )


def _summary(plan: Plan) -> str:
    """Return two indented lines on a plan: its number formats, and what stays float."""
    before, after = weight_bytes(plan)
    left, _ = left_parameters(plan)
    lines = [
        tables.format_counts(plan),
        f"{share_left(left)}; weights {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB",
    ]
    return "\n".join(f"  {line}" for line in lines)
