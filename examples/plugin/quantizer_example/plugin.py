"""What this package adds to quantizer. It imports no torch."""

from quantizer.declarations import ExportTarget, Plugin
from quantizer.rows import ObserverClass, RangeMethod

_MEANSTD = RangeMethod(
    "quantizer_example.ranges:mean_and_deviations",
    "the mean plus and minus four standard deviations",
    observers={
        "PerTensorMeanStdObserver": ObserverClass(
            ("per_tensor",),
            "the mean plus and minus four standard deviations; per_tensor",
            "the mean plus and minus four standard deviations",
        )
    },
)
_ARCHIVE = ExportTarget("quantizer_example.archive:ArchiveExporter", ".zip", "numpy")

PLUGIN = Plugin(
    "example",
    targets={"archive": _ARCHIVE},
    range_methods={"meanstd": _MEANSTD},
    operators="quantizer_example.operators:ROWS",
)
