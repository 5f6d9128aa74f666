"""Lists the columns of figures in the table of layers, with their meanings."""

from dataclasses import dataclass

from quantizer.config.json_types import JsonMapping
from quantizer.report.page.figures import ACCUMULATED, LOCAL
from quantizer.report.page.rows import LOW, POOR, Bounds, bounds_of, is_lossless

_LOCAL_KEY = "local_sqnr_db"


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        title: with the unit.
        key: of the figure in a row of report.json.
        form: of the number.
        meaning: a phrase for the legend.
        factor: the figure is multiplied by it.
    """

    title: str
    key: str
    form: str
    meaning: str
    factor: float = 1.0

    @property
    def is_local(self) -> bool:
        """Return whether rows are marked by this figure."""
        return self.key == _LOCAL_KEY

    def value(self, row: JsonMapping) -> float | None:
        """Return the figure of a row; None where there is none."""
        figure = row.get(self.key)
        return None if figure is None else figure * self.factor


_COLUMNS = (
    Column(
        "local SQNR, dB",
        _LOCAL_KEY,
        "{:.2f}",
        f"{LOCAL.partition(': ')[2]}, and its inputs are float; higher is better. A low value "
        "is a cause of loss",
    ),
    Column(
        "accumulated SQNR, dB",
        "accumulated_sqnr_db",
        "{:.2f}",
        f"{ACCUMULATED.partition(': ')[2]}; higher is better. A low value may come from the "
        "layers before",
    ),
    Column(
        "clipped, %",
        "clipped",
        "{:.3g}",
        "share of values beyond the range of codes; lower is better",
        100.0,
    ),
    Column(
        "codes used, %",
        "codes_used",
        "{:.0f}",
        "share of the codes that occur; higher is better",
        100.0,
    ),
    Column("size, kB", "bytes", "{:.1f}", "of codes and scales; lower is better", 1e-3),
)


def layer_columns(content: JsonMapping) -> list[Column]:
    """Return the columns that have a figure for some tensor."""
    columns = []
    for column in _COLUMNS:
        if any(column.value(row) is not None for row in content["layers"]):
            columns.append(column)
    return columns


def layers_legend(content: JsonMapping) -> dict[str, str]:
    """Return what the columns mean, by title."""
    legend = {}
    for column in layer_columns(content):
        legend[column.title] = column.meaning
        if column.is_local:
            legend[column.title] += f". Marked as {LOW} or {POOR}: {_marks(content)}"
    return legend


def _marks(content: JsonMapping) -> str:
    """Return for the widths in the table the bounds below which rows are marked."""
    widths_by_bounds: dict[Bounds, set[int]] = {}
    for row in content["layers"]:
        if not is_lossless(content, row):
            bits = row.get("bits", 8)
            widths_by_bounds.setdefault(bounds_of(bits), set()).add(bits)
    phrases = []
    for bounds, widths in widths_by_bounds.items():
        names = ", ".join(map(str, sorted(widths)))
        phrases.append(
            f"below {bounds.low_db:g} or {bounds.poor_db:g} dB where values have {names} bits"
        )
    return "; ".join(phrases)
