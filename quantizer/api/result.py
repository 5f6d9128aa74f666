"""What `calibrate` and `load` give: a plan, a quantized network, and the ways to test, save and export it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from quantizer.api.notebook import html_table
from quantizer.api.report import Report
from quantizer.config.wording import closest
from quantizer.engine import results
from quantizer.engine.calibrated import Calibrated
from quantizer.engine.events import Events
from quantizer.engine.job import Job
from quantizer.engine.module_target import evaluating
from quantizer.engine.result_set import locked
from quantizer.engine.scores import Scores, score
from quantizer.errors import DataError, GateError, ModelError, UsageError
from quantizer.export import EXPORTERS, check, export, require_extras
from quantizer.export.agreement import Verification
from quantizer.export.choices import require_choices
from quantizer.export.deployment import Deployment
from quantizer.plan.model import Plan
from quantizer.report import tables
from quantizer.report.files import write_report
from quantizer.report.view import View
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.user_code import user_exits


class PlanView:
    """A plan that shows as a table; its decisions are those of `plan`, a `quantizer.plan.model.Plan`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def to_json(self) -> dict[str, Any]:
        """As plan.json has it."""
        return self.plan.to_json()

    def __repr__(self) -> str:
        return f"Plan({len(self.plan.tensors)} tensors of {self.plan.graph.model})"

    def _repr_html_(self) -> str:
        return html_table(tables.rule_table(self.plan)) + html_table(tables.plan_table(self.plan, View()))


class Comparison:
    """What a test found.

    Attributes:
        metrics: by name: sqnr_db, cosine, the user's own with `_float` and `_drop` beside them.
        layers: a row per quantized tensor, the most damaged first, with local and accumulated SQNR in dB.
    """

    def __init__(self, scores: Scores, calibrated: Calibrated, stamp: str | None = None) -> None:
        specs = {key: tensor.spec for key, tensor in calibrated.solution.tensors.items()}
        self.metrics: Mapping[str, float] = scores.metrics
        self.layers = tables.layer_rows(scores.comparison, specs)
        self._pairs, self._stamp = scores.pairs, stamp

    def require(self, **least: float) -> Comparison:
        """Raise GateError for each metric below what is given: `require(sqnr_db=20)`; returns itself.

        Raises:
            GateError: naming those that are not met.
            UsageError: there is no such metric.
        """
        for name in least:
            if name not in self.metrics:
                near = closest(name, list(self.metrics))
                known = f"did you mean {near}?" if near else f"known here: {', '.join(sorted(self.metrics))}"
                raise UsageError(f"there is no metric {name!r}", help=known)
        failed = [f"{name}>={bound:g}" for name, bound in least.items() if not self.metrics[name] >= bound]
        if failed:
            raise GateError(f"not met: {', '.join(failed)}", help="layers, the worst first, shows which lose most")
        return self

    def to_json(self) -> dict[str, Any]:
        """As report.json has it, beside what calibration found."""
        return tables.report(self.metrics, self._pairs, self.layers, self._stamp)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(f'{name}={value:.6g}' for name, value in self.metrics.items())})"

    def _repr_html_(self) -> str:
        shown = html_table(tables.damage_table(self.layers, View()))
        pairs = html_table(tables.metric_table(self._pairs)) if self._pairs else ""
        return f"<p>{self!r}</p>{pairs}{shown}"


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
        folder: Path | None = None,
    ) -> None:
        self.plan = PlanView(plan)
        self._model, self._calibrated, self._batches, self._events = model, calibrated, batches, events
        self._job, self._folder = job, folder

    @cached_property
    def network(self) -> nn.Module:
        """The quantized network, called as the model; equal to test mode bit for bit."""
        return self._calibrated.network()

    @user_exits("the model", ModelError)
    def test(
        self, data: Any = None, evaluate: Callable[[Callable[..., Any], Iterable[Any]], dict[str, float]] | None = None
    ) -> Comparison:
        """Run the quantized and the float network on the same batches.

        Args:
            data: as in `calibrate`; None for those that were given there, or to `load`.
            evaluate: `evaluate(model, data)` gives a dict of metrics; without it top-1 accuracy or perplexity is found
                where the data have targets.

        Raises:
            DataError: no batches, or outputs that are not finite.
        """
        batches = self._given(data)
        with evaluating(self._model):
            scores = score(self._calibrated, self._model, batches, self._events, evaluate, explained=True)
        return Comparison(scores, self._calibrated, batches.stamp)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the result folder, as the shell does: the same files, byte for byte, but run.json and run.log.

        Raises:
            ResultError: it cannot be written, is in use, or holds results of another model.
        """
        place = Path(folder)
        with locked(place):
            results.check_owner(place, self._calibrated.graph.model, overwrite=overwrite)
            if self._job is not None:
                self._write(place, self._job)
            elif self._folder is not None and self._folder.resolve() != place.resolve():
                with results.replaced_results(place) as new:
                    for name in results.names_of(self._folder):
                        shutil.copyfile(self._folder / name, new / name)
            write_report(place)

    def _write(self, place: Path, job: Job) -> None:
        original = self._calibrated.original
        results.write_results(place, original, job.config, job.calibration, job.solution, job.header)

    def report(self, path: str | os.PathLike[str] | None = None, tested: Comparison | None = None) -> Report:
        """The page about this calibration, as the result folder has it, and about a test of it.

        Args:
            path: where to write it, too; a notebook shows what is returned.
            tested: what `test` gave.

        Raises:
            ResultError: it cannot be written.
        """
        with TemporaryDirectory() as place:
            folder = self._folder or Path(place)
            if self._job is not None:
                self._write(folder := Path(place), self._job)
            report = Report(folder, tested.to_json() if tested else {})
        if path is not None:
            report.save(path)
        return report

    @user_exits("the model", ModelError)
    def export(
        self,
        target: str,
        path: str | os.PathLike[str],
        data: Any = None,
        *,
        pt2_activations: str = "uint8",
        onnx_profile: str = "exact",
        onnx_weights: str = "uint8",
        gguf_template: str | os.PathLike[str] = "",
    ) -> Verification:
        """Write the network for another runtime and verify the file: "onnx", "pt2", "pt2_float" or "safetensors".

        Engines for language models load what is written of a model of transformers: "compressed-tensors", a folder, and
        "gguf", a file, whose scales are rounded to halfs.

        Args:
            data: to verify it with; as in `test`.
            pt2_activations: the integers of activations in a .pt2: "uint8" for torch's compiler, "int8" for ExecuTorch.
            onnx_profile: "exact" rounds in an .onnx as the config says, "fast" as ONNX Runtime's fastest kernels do.
            onnx_weights: 8-bit weights in an .onnx are "uint8" for any CPU, or "int8" for those with VNNI, faster.
            gguf_template: a .gguf of the same model, whose keys and tokenizer another keeps.

        Raises:
            DataError: there are no data.
            UsageError: there is no such target, its packages are missing, or it cannot express this config; or
                there are no such integers.
            VerificationError: the file does not compute what test mode does; it is not left there.
        """
        if target not in EXPORTERS:
            raise UsageError(f"there is no export target {target!r}", help=f"known are {', '.join(EXPORTERS)}")
        choices = {"pt2_activations": pt2_activations, "onnx_profile": onnx_profile, "onnx_weights": onnx_weights}
        choices["gguf_template"] = os.fspath(gguf_template)
        require_choices(choices, [target])
        require_extras([target])
        calibrated = self._calibrated
        check(target, calibrated.graph, calibrated.solution.specs, calibrated.settings.onnx_opset_version)
        batches = self._given(data)
        loss = score(calibrated, self._model, batches, self._events).comparison.output.sqnr_db
        given = Deployment.of(calibrated, self._model, batches, loss, choices)
        return export(target, given, Path(path), self._events, batches.total)

    def _given(self, data: Any) -> Batches:
        """These data, or those that the result was made with."""
        if data is None and self._batches.stands_in:
            raise DataError("there are no data", help="give them here or to `load`")
        return self._batches if data is None else load_batches(data, module=self._model)

    def __repr__(self) -> str:
        return f"Result({len(self._calibrated.solution.tensors)} tensors of {self._calibrated.graph.model} quantized)"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>{self.plan._repr_html_()}"
