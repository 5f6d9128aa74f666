"""Defines `Comparison`, the figures of a test, and `Report`, which shows them with those of the
calibration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizer.api.display import called_from_python, html_table
from quantizer.config.wording import counted, did_you_mean, first_names
from quantizer.declarations import DROP, RATIO, RISE
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.scores import Scores, remark_on_samples
from quantizer.export.gates import Gate, failed_gates, parse_gate
from quantizer.graph.names import path_names
from quantizer.printable import element
from quantizer.report import tables
from quantizer.report.content import make_report, shown_by_plugin
from quantizer.report.view import TableView
from quantizer.results.calibrated import Calibrated
from quantizer.results.folder import OpenedResults
from quantizer.storage.files import write_text
from quantizer.storage.permission import replacing

_logger = logging.getLogger(__name__)

_SHOWN_METRICS = 8
"""Metrics that a comparison shows."""
_SHOWN_LAYERS = 3
"""Layers that a comparison shows."""


class Comparison:
    """Holds the figures of a test.

    Attributes:
        metrics: the figures by name. `sqnr_db` and `cosine` are those of the worst output or
            part, `sqnr_db_worst` is that of its worst samples, `sqnr_db_pooled` that of all
            outputs together. For a metric X of the task,
            `X_float` is the value of the float network. If it is known whether more or less of
            X is better, `X_drop` is the loss of quality; where less is, also `X_rise`.
        outputs: a row of figures for each output, and for each part of an output that is joined
            from several.
        warnings: the warnings about outputs that lose much more than the others, with the
            causes.
        layers: a row for each quantized tensor, the most damaged first, with local and
            accumulated SQNR in dB.
        passes: the losses by passes that change the model's function and by quantization, on
            one batch; None if there are no such passes.
    """

    def __init__(
        self,
        scores: Scores,
        calibrated: Calibrated,
        stamp: str | None = None,
        *,
        calibration_stamp: str | None = None,
    ) -> None:
        self.metrics: Mapping[str, float] = scores.metrics
        self.outputs = tables.output_rows(scores.comparison.outputs)
        self.warnings = [warning.to_json() for warning in scores.warnings]
        self.layers = tables.layer_rows(scores.comparison, calibrated.solution.specs)
        self.passes = scores.passes
        self._scores = scores
        self._stamp = stamp
        self._calibration_stamp = calibration_stamp
        self._paths = path_names(calibrated.graph)

    def require(self, *gates: str, **bounds: float) -> Comparison:
        """Raise `GateError` if metrics are worse than their bounds. Otherwise return this
        comparison.

        A bound is a minimum, or a maximum for metrics of which less is better:
        `require(sqnr_db=20, top1_drop=0.01)`. A text has its comparison, as in the shell:
        `require("sqnr_db>=20", "sqnr_db[0.scores]>=30")`.

        Args:
            gates: texts as for `--gate`.
            bounds: the bound of each metric, by its name.

        Raises:
            GateError: metrics are worse than their bounds. The message names these bounds.
            UsageError: there is no such metric, a text is not a comparison, or it is not known
                whether less is better.
        """
        asked = [parse_gate(text) for text in gates]
        for name, bound in bounds.items():
            comparison = "<=" if self._is_bounded_above(name) else ">="
            asked.append(Gate(f"{name}{comparison}{bound:g}", name, comparison, bound))
        metrics = self._scores.gated
        for gate in asked:
            self._require_known(gate.metric)
            remark = remark_on_samples(gate.metric, metrics)
            if remark and gate.holds(metrics):
                _logger.warning("%s is met, but %s", gate.text, remark)
        failed = failed_gates(asked, metrics)
        if failed:
            raise GateError(
                f"not met: {', '.join(failed)}",
                help="see which layers lose most in `layers`, the worst first",
            )
        return self

    def _require_known(self, name: str) -> None:
        """Raise `UsageError` if there is no such metric. Its help names the known ones, or says
        how to declare a direction.
        """
        if name in self._scores.gated:
            return
        base = name.removesuffix(DROP).removesuffix(RISE)
        is_loss = base != name and base in self._scores.pairs
        if is_loss and f"{base}{DROP}" not in self._scores.gated:
            remedy = f"give lower_is_better={{{base!r}}} or higher_is_better={{{base!r}}}"
            raise UsageError(
                f"whether less or more of {base!r} is better is not known", help=remedy
            )
        known = f"known here: {', '.join(sorted(self.metrics))}"
        remedy = did_you_mean(name, self._scores.gated, known)
        raise UsageError(f"there is no metric {name!r}", help=remedy)

    def _is_bounded_above(self, name: str) -> bool:
        """Return whether a larger value of a metric is worse."""
        for base in self._scores.pairs:
            if name == f"{base}_float":
                return self._scores.directions.lower_is_better(base) is True
            if name in (f"{base}{DROP}", f"{base}{RISE}", f"{base}{RATIO}"):
                return True
        return self._scores.directions.of_figure(name, self._scores.pairs) is True

    def to_json(self) -> dict[str, Any]:
        """Return the part of report.json about the test."""
        return tables.report_values(
            self._scores, self.layers, self._stamp, self._calibration_stamp
        )

    def _stamps(self) -> Iterator[str]:
        """Yield lines on which data judged, and on data that are not real."""
        if self._scores.judged_on:
            yield f"  measured {self._scores.judged_on['text']}"
        if self._stamp:
            yield f"  these figures are of {self._stamp}"
        if self._calibration_stamp:
            yield f"  calibrated on {self._calibration_stamp}"

    def _title(self) -> str:
        metrics = [f"{name}={value:.6g}" for name, value in self.metrics.items()]
        return f"Comparison({first_names(metrics, _SHOWN_METRICS)})"

    def __repr__(self) -> str:
        lines = [self._title(), *self._stamps()]
        worst = []
        for row in self.layers[:_SHOWN_LAYERS]:
            layer = self._paths.get(row["layer"], row["layer"])
            worst.append(f"{row['local_sqnr_db']:.1f} dB {layer} {row['tensor']}")
        if worst:
            lines.append(f"  lowest local SQNR: {', '.join(worst)}")
        if self.warnings:
            lines.append(f"  {counted(len(self.warnings), 'warning')}: see .warnings")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        html = str(element("p", self._title()))
        for line in self._stamps():
            html += element("p", line.strip())
        if self.passes is not None:
            html += element("p", self.passes.line)
        if self._scores.pairs:
            html += html_table(tables.metric_table(self._scores.pairs))
        if len(self.outputs) > 1:
            html += html_table(tables.output_table(self.outputs, TableView()))
        html += html_table(tables.damage_table(self.layers, TableView()))
        return html + element("p", tables.usual_text(tables.usual_specs(self.layers)))


class Report:
    """Holds the report of a calibration and of a test of it. A notebook shows it as a page.

    Attributes:
        values: the content of report.json.
        html: the content of report.html; empty if no plug-in makes it.
    """

    def __init__(self, opened: OpenedResults, tested: dict[str, Any]) -> None:
        self.values, self.html = make_report(opened, tested)

    @called_from_python()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the page.

        Args:
            path: the file to write.
            overwrite: whether a file that exists is replaced.

        Raises:
            UsageError: the file exists, or no plug-in makes the page.
            ResultError: it cannot be written.
        """
        with replacing(overwrite=overwrite):
            html: str = self.html or shown_by_plugin("page")(self.values)
            write_text(Path(path), html)

    @called_from_python()
    def save_plots(
        self, folder: str | os.PathLike[str], kind: str = "svg", *, overwrite: bool = False
    ) -> list[Path]:
        """Write each drawing as a file, and return the paths.

        Args:
            folder: the folder to write to.
            kind: "svg", or "png", which needs the extra "plots".
            overwrite: whether files that exist are replaced.

        Raises:
            UsageError: a file exists, there is no such kind, or its package is missing.
            ResultError: a file cannot be written.
        """
        with replacing(overwrite=overwrite):
            paths: list[Path] = shown_by_plugin("plots")(self.values, Path(folder), kind)
            return paths

    @called_from_python()
    def save_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write figures and histograms for TensorBoard.

        Args:
            folder: the folder to write to.

        Raises:
            UsageError: the package tensorboard is missing.
            ResultError: the folder cannot be written.
        """
        shown_by_plugin("events")(self.values, Path(folder))

    def __repr__(self) -> str:
        return f"Report({len(self.values['layers'])} tensors of {self.values['model']})"

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style apart."""
        if not self.html:
            return element("p", repr(self))
        return element(
            "iframe",
            srcdoc=self.html,
            style="width: 100%; height: 50rem; border: 0",
            title=repr(self),
        )
