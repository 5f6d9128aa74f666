"""Defines what `quantize` returns."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from quantizer.api.comparison import Comparison
from quantizer.api.result import Result
from quantizer.export.agreement import Verification


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
