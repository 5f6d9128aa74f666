"""Shows the report of a calibration in a notebook, and writes it to files."""

import os
from pathlib import Path
from typing import Any

from quantizer.api.python_words import called_from_python
from quantizer.report.files import make_report
from quantizer.report.page.html import element
from quantizer.report.plots import write_events, write_plots
from quantizer.results.folder import OpenedResults
from quantizer.storage.files import write_text
from quantizer.storage.permission import replacing


class Report:
    """Holds the report of a calibration and of a test of it. A notebook shows it as a page.

    Attributes:
        values: the content of report.json.
        html: the content of report.html.
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
            UsageError: the file exists.
            ResultError: it cannot be written.
        """
        with replacing(overwrite=overwrite):
            write_text(Path(path), self.html)

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
            return write_plots(self.values, Path(folder), kind)

    @called_from_python()
    def save_tensorboard(self, folder: str | os.PathLike[str]) -> None:
        """Write figures and histograms for TensorBoard.

        Args:
            folder: the folder to write to.

        Raises:
            UsageError: the package tensorboard is missing.
            ResultError: the folder cannot be written.
        """
        write_events(self.values, Path(folder))

    def __repr__(self) -> str:
        return f"Report({len(self.values['layers'])} tensors of {self.values['model']})"

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style apart."""
        return element(
            "iframe",
            srcdoc=self.html,
            style="width: 100%; height: 50rem; border: 0",
            title=repr(self),
        )
