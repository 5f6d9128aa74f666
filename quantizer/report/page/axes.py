"""Put axes, a legend and texts to read values by around the data of a drawing.

Drawings have a fixed width in their own units, and are scaled to the column of the page. Their
colours and the size of texts are in drawing.css, by class.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantizer.printable import Markup, element, fragment

WIDTH = 720
"""The width of a drawing. All lengths are in the units of the drawing."""
ROW = 26
"""The height of a line of text. On narrow screens texts have 24 units, to be readable."""
LEFT = 92
"""The width of the numbers at the vertical axis."""
_RIGHT = 20
DATA_WIDTH = WIDTH - LEFT - _RIGHT
_BASELINE = 19
"""From the top of a line of text to its baseline."""
_GAP = 8
_TICK_SPACE = 34
"""The least distance of two numbers at the vertical axis."""


@dataclass(frozen=True)
class Scale:
    """Converts values to lengths of a drawing."""

    low: float
    high: float
    size: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return (value - self.low) / span * self.size


Tick = tuple[float, str]
"""A value at an axis, and its label."""


def hover(positions: Iterable[float], texts: Iterable[str], form: str = "{}") -> dict[str, str]:
    """Return the attributes of a drawing with the texts that the script of the page shows for
    the nearest position under the pointer.

    Args:
        positions: along the drawing, in its units.
        texts: one for each position.
        form: the text to show; `{}` stands for that of the position.
    """
    return {
        "data_positions": " ".join(map("{:.0f}".format, positions)),
        "data_texts": "\n".join(text.replace("\n", " ") for text in texts),
        "data_form": form,
    }


@dataclass(frozen=True)
class Axes:
    """The axes and the legend of a drawing.

    Attributes:
        x_name, y_name: what the axes show, with units.
        x, y: scales of the values. `y` counts from the bottom.
        x_ticks, y_ticks: the numbers at the axes.
        legend: what marks of a colour stand for, with the class of the colour.
        rows: lines of text between the legend and the data.
    """

    x_name: str
    y_name: str
    x: Scale
    y: Scale
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    legend: Sequence[tuple[str, str]]
    rows: int = 0

    @property
    def rows_top(self) -> float:
        """Return where the lines of text above the data begin."""
        return ROW * (1 + len(self.legend))

    @property
    def top(self) -> float:
        """Return where the data begins."""
        return self.rows_top + ROW * self.rows + _GAP

    @property
    def bottom(self) -> float:
        """Return where the data ends."""
        return self.top + self.y.size

    def across(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return LEFT + self.x(value)

    def up(self, value: float) -> float:
        """Return the vertical position of a value."""
        return self.bottom - self.y(value)

    def drawing(
        self, title: str, *parts: Markup | Iterable[Markup], hover: Mapping[str, str]
    ) -> Markup:
        """Return the drawing.

        Args:
            title: of the drawing.
            parts: the data.
            hover: the attributes with the texts to read values by.
        """
        labels = [fragment(self.y_name)]
        for label, kind in self.legend:
            labels.append(fragment(element("tspan", "■", class_=kind), f" {label}"))
        names = [
            element("text", label, x=0, y=ROW * index + _BASELINE)
            for index, label in enumerate(labels)
        ]
        y = f"{self.bottom + ROW + _BASELINE:.0f}"
        names.append(element("text", self.x_name, x=WIDTH, y=y, text_anchor="end"))
        height = self.bottom + 2 * ROW
        return element(
            "svg",
            element("title", title),
            names,
            [self._y_tick(*tick) for tick in self.y_ticks],
            *parts,
            [self._x_tick(*tick) for tick in self.x_ticks],
            viewBox=f"0 0 {WIDTH} {height + _GAP:.0f}",
            role="img",
            aria_label=title,
            **hover,
        )

    def _y_tick(self, value: float, label: str) -> Markup:
        y = self.up(value)
        line = element(
            "line", x1=LEFT, x2=WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"
        )
        text = element("text", label, x=LEFT - _GAP, y=f"{y + 5:.1f}", text_anchor="end")
        return fragment(line, text)

    def _x_tick(self, value: float, label: str) -> Markup:
        share = self.x(value) / DATA_WIDTH
        anchor = "middle"
        if share < 0.1:
            anchor = "start"
        elif share > 0.9:
            anchor = "end"
        return element(
            "text",
            label,
            x=f"{self.across(value):.1f}",
            y=f"{self.bottom + _BASELINE:.0f}",
            text_anchor=anchor,
        )


def number(value: float) -> str:
    """Return a number for a label.

    >>> number(0.000123456), number(1234.5), number(-0.0), number(12)
    ('0.000123', '1.23e+03', '0', '12')
    """
    return f"{value:.3g}" if value else "0"


def three_ticks(low: float, high: float) -> list[Tick]:
    """Return the ends and the middle of an axis. Between integers, the middle is an integer.

    >>> three_ticks(0.0, 5.0)
    [(0.0, '0'), (2.5, '2.5'), (5.0, '5')]
    >>> three_ticks(1, 8)
    [(1, '1'), (4, '4'), (8, '8')]
    """
    middle = (low + high) / 2
    if isinstance(low, int) and isinstance(high, int):
        middle = (low + high) // 2
    return [(value, number(value)) for value in (low, middle, high)]


def round_ticks(scale: Scale) -> list[Tick]:
    """Return round values for an axis, as many as there is room for.

    >>> [label for _, label in round_ticks(Scale(0, 47, 200))]
    ['0', '10', '20', '30', '40']
    """
    count = max(2.0, min(5.0, scale.size / _TICK_SPACE))
    rough_step = ((scale.high - scale.low) or 1.0) / count
    step = 10.0 ** math.floor(math.log10(rough_step))
    # The step becomes 1, 2, 5 or 10 times a power of ten
    for factor in (2, 2.5, 2):
        if step < rough_step:
            step *= factor
    first = math.ceil(scale.low / step)
    last = math.floor(scale.high / step)
    return [(step * index, number(step * index)) for index in range(first, last + 1)]
