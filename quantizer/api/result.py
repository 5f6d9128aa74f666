"""What `calibrate` and `load` give: a plan, a quantized network, and the ways to test, save and
export it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from quantizer.api.notebook import html_table
from quantizer.api.report import Report
from quantizer.calibration.events import Events
from quantizer.calibration.job import Job
from quantizer.calibration.module_target import evaluating
from quantizer.config.wording import closest
from quantizer.errors import DataError, GateError, ModelError, UsageError
from quantizer.evaluation.scores import DROP, RATIO, Scores, score
from quantizer.export import EXPORTERS, check, export, require_extras
from quantizer.export.agreement import Verification
from quantizer.export.choices import require_choices
from quantizer.export.deployment import Deployment
from quantizer.plan.model import Plan
from quantizer.report import tables
from quantizer.report.files import READ, write_report
from quantizer.report.page.html import element
from quantizer.report.view import View
from quantizer.results.calibrated import Calibrated
from quantizer.results.folder import OpenedResults, open_written
from quantizer.results.result_set import locked
from quantizer.results.write import check_owner, write_copy, write_results
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.directions import Directions
from quantizer.sources.models import Evaluate
from quantizer.sources.user_code import user_exits


class PlanView:
    """A plan that shows as a table; its decisions are those of `plan`, a
    `quantizer.plan.model.Plan`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def to_json(self) -> dict[str, Any]:
        """As plan.json has it."""
        return self.plan.to_json()

    def __repr__(self) -> str:
        return f"Plan({len(self.plan.tensors)} tensors of {self.plan.graph.model})"

    def _repr_html_(self) -> str:
        return html_table(tables.rule_table(self.plan)) + html_table(
            tables.plan_table(self.plan, View())
        )


class Comparison:
    """What a test found.

    Attributes:
        metrics: by name: sqnr_db and cosine of the worst output or part, sqnr_db_pooled of all
            together, the user's own with `_float` beside them, and with `_drop`, the loss of
            quality, where it is known which way a metric is good.
        outputs: a row per output, and per part that a join or a write makes of one, with its
            own figures.
        warnings: what outputs lose that the figures of all together would hide, and the tensors
            to blame.
        layers: a row per quantized tensor, the most damaged first, with local and accumulated
            SQNR in dB.
        passes: what passes that change the model's function cost on one batch, and what
            quantization does; None if there are none.
    """

    def __init__(
        self, scores: Scores, calibrated: Calibrated, stamp: str | None = None
    ) -> None:
        specs = {key: tensor.spec for key, tensor in calibrated.solution.tensors.items()}
        self.metrics: Mapping[str, float] = scores.metrics
        self.outputs = tables.output_rows(scores.comparison.outputs)
        self.warnings = [warning.to_json() for warning in scores.warnings]
        self.layers = tables.layer_rows(scores.comparison, specs)
        self._scores, self._pairs, self._stamp = scores, scores.pairs, stamp
        self._directions = scores.directions
        self.passes = scores.passes

    def require(self, **bounds: float) -> Comparison:
        """Raise GateError for each metric that is worse than its bound: `require(sqnr_db=20)`;
        returns itself.

        A bound is the least that a metric may be, or the most where less is better:
        `require(mae=0.1, top1_drop=0.01)`.

        Of one output or part: `require(**{"sqnr_db[0.scores]": 30})`.

        Raises:
            GateError: naming those that are not met.
            UsageError: there is no such metric, or which way it is good is unknown.
        """
        metrics = self._scores.gated
        failed = []
        for name, bound in bounds.items():
            self._require_known(name)
            if self._is_bounded_above(name):
                comparison, holds = "<=", metrics[name] <= bound
            else:
                comparison, holds = ">=", metrics[name] >= bound
            if not holds:
                failed.append(f"{name}{comparison}{bound:g}")
        if failed:
            raise GateError(
                f"not met: {', '.join(failed)}",
                help="layers, the worst first, shows which lose most",
            )
        return self

    def _require_known(self, name: str) -> None:
        """Refuse a bound for a metric that there is not.

        Raises:
            UsageError: saying which there are, or how its direction is declared.
        """
        if name in self._scores.gated:
            return
        base = name.removesuffix(DROP)
        if name.endswith(DROP) and base in self._pairs:
            remedy = (
                f"give test() lower_is_better={{{base!r}}} or higher_is_better={{{base!r}}}"
            )
            raise UsageError(
                f"whether less or more of {base!r} is better is not known", help=remedy
            )
        near = closest(name, list(self._scores.gated))
        known = (
            f"did you mean {near}?"
            if near
            else f"known here: {', '.join(sorted(self.metrics))}"
        )
        raise UsageError(f"there is no metric {name!r}", help=known)

    def _is_bounded_above(self, name: str) -> bool:
        """Whether more of a metric is worse."""
        for base in self._pairs:
            if name == f"{base}_float":
                return self._directions.lower_is_better(base) is True
            if name in (f"{base}{DROP}", f"{base}{RATIO}"):
                return True
        return self._directions.of_figure(name, self._pairs) is True

    def to_json(self) -> dict[str, Any]:
        """As report.json has it, beside what calibration found."""
        return tables.report(
            self.metrics,
            self._pairs,
            self.layers,
            self._stamp,
            self.passes,
            outputs=self._scores.comparison.outputs,
            warnings=self._scores.warnings,
            directions=self._directions,
        )

    def __repr__(self) -> str:
        metrics = [f"{name}={value:.6g}" for name, value in self.metrics.items()]
        return f"Comparison({', '.join(metrics)})"

    def _repr_html_(self) -> str:
        shown = html_table(tables.damage_table(self.layers, View()))
        pairs = html_table(tables.metric_table(self._pairs)) if self._pairs else ""
        passes = "" if self.passes is None else element("p", self.passes.line)
        outputs = (
            html_table(tables.output_table(self.outputs, View()))
            if len(self.outputs) > 1
            else ""
        )
        return f"<p>{self!r}</p>{passes}{pairs}{outputs}{shown}"


class Result:
    """A calibrated model.

    Attributes:
        plan: what was decided for each tensor; shows as a table in a notebook.
    """

    def __init__(
        self,
        model: nn.Module,
        calibrated: Calibrated,
        plan: Plan,
        batches: Batches,
        events: Events,
        *,
        job: Job | None = None,
        opened: OpenedResults | None = None,
    ) -> None:
        self.plan = PlanView(plan)
        self._model, self._calibrated, self._batches, self._events = (
            model,
            calibrated,
            batches,
            events,
        )
        self._job, self._opened = job, opened

    @cached_property
    def network(self) -> nn.Module:
        """The quantized network, called as the model; equal to test mode bit for bit."""
        return self._calibrated.network()

    @user_exits("the model", ModelError)
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
            data: as in `calibrate`; None for those that were given there, or to `load`.
            evaluate: `evaluate(model, data)` gives a dict of metrics; without it top-1 accuracy
                or perplexity is found where the data have targets.
            lower_is_better: names of metrics of `evaluate` of which less is better, where the
                name does not say so.
            higher_is_better: names of those of which more is better.

        Raises:
            DataError: no batches, or outputs that are not finite.
            UsageError: a metric is declared as both.
        """
        directions = Directions.of(lower_is_better, higher_is_better)
        function = None if evaluate is None else Evaluate(evaluate, directions)
        batches = self._given(data)
        with evaluating(self._model):
            scores = score(
                self._calibrated, self._model, batches, self._events, function, explained=True
            )
        return Comparison(scores, self._calibrated, batches.stamp)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the result folder, as the shell does: the same files, byte for byte, but
        run.json and run.log, and reports without the commands that would make them again.

        Raises:
            ResultError: it cannot be written, is in use, or holds results of another model.
        """
        place = Path(folder)
        with locked(place):
            check_owner(place, self._calibrated.graph.model, overwrite=overwrite)
            if self._job is not None:
                self._write(place, self._job)
            elif self._opened is not None and not self._is_in(place):
                write_copy(place, self._opened)
            write_report(open_written(place, READ))

    def _is_in(self, place: Path) -> bool:
        """Whether the folder is the one that was loaded, and nobody has replaced its
        results.
        """
        opened = self._opened
        if opened is None or opened.folder.resolve() != place.resolve():
            return False
        return opened.files.is_current()

    def _write(self, place: Path, job: Job) -> None:
        original = self._calibrated.original
        write_results(place, original, job.config, job.calibration, job.solution, job.header)

    def report(
        self, path: str | os.PathLike[str] | None = None, tested: Comparison | None = None
    ) -> Report:
        """The page about this calibration, as the result folder has it, and about a test of it.

        Args:
            path: where to write it, too; a notebook shows what is returned.
            tested: what `test` gave.

        Raises:
            ResultError: it cannot be written.
        """
        with TemporaryDirectory() as place:
            if self._job is not None:
                self._write(Path(place), self._job)
            opened = self._opened or open_written(Path(place), READ)
            report = Report(opened, tested.to_json() if tested else {})
        if path is not None:
            report.save(path)
        return report

    @user_exits("the model", ModelError)
    def export(
        self,
        target: str,
        path: str | os.PathLike[str],
        data: Any = None,
        **options: str | os.PathLike[str],
    ) -> Verification:
        """Write the network for another runtime and verify the file: "onnx", "pt2", "pt2_float"
        or "safetensors".

        Engines for language models load what is written of a model of transformers:
        "compressed-tensors", a folder, and "gguf", a file, whose scales are rounded to halfs.

        Args:
            data: to verify it with; as in `test`.
            options: of the target, by the names of the command line's options without dashes:
                pt2_activations, onnx_profile, onnx_weights or gguf_template, as in
                `quantizer.export.targets`.

        Raises:
            DataError: there are no data.
            UsageError: there is no such target, its packages are missing, or it cannot express
                this config; or it has no such option.
            VerificationError: the file does not compute what test mode does; it is not left
                there.
        """
        if target not in EXPORTERS:
            raise UsageError(
                f"there is no export target {target!r}",
                help=f"known are {', '.join(EXPORTERS)}",
            )
        choices = {name: os.fspath(value) for name, value in options.items()}
        require_choices(choices, [target])
        require_extras([target])
        calibrated = self._calibrated
        check(
            target,
            calibrated.graph,
            calibrated.solution.specs,
            calibrated.settings.onnx_opset_version,
        )
        batches = self._given(data)
        scores = score(calibrated, self._model, batches, self._events, explained=True)
        figures, lost = scores.quantization, scores.lost
        given = Deployment.of(
            calibrated, self._model, batches, figures, choices=choices, warnings=lost
        )
        return export(target, given, Path(path), self._events, total=batches.total)

    def _given(self, data: Any) -> Batches:
        """These data, or those that the result was made with."""
        if data is None and self._batches.stands_in:
            raise DataError("there are no data", help="give them here or to `load`")
        return self._batches if data is None else load_batches(data, module=self._model)

    def __repr__(self) -> str:
        return (
            f"Result({len(self._calibrated.solution.tensors)} tensors of "
            f"{self._calibrated.graph.model} quantized)"
        )

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>{self.plan._repr_html_()}"
