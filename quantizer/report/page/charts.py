"""Draw histograms, lines, points and strips of channels as SVG.

Drawings have a fixed width in their own units, and are scaled to the column of the page. Their
colours are in drawing.css, by class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantizer.report.page.html import Markup, element, fragment

_WIDTH = 720
"""The width of a drawing. All lengths in this file are in the units of the drawing."""
_TOP = 22
"""The height of the legend."""
_LEFT = 40
"""The width of the numbers at the vertical axis."""
_RIGHT = 20


@dataclass(frozen=True)
class Mark:
    """A vertical line in a histogram, at the end of a range."""

    value: float
    label: str
    kind: str = "other"


@dataclass(frozen=True)
class Series:
    """The values of a line, by position. None leaves a gap."""

    label: str
    values: Sequence[float | None]
    kind: str = "first"


@dataclass(frozen=True)
class Point:
    """A point of a plot, and the text that is shown when the mouse is over it."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class _Scale:
    """Converts values to lengths of a drawing."""

    low: float
    high: float
    size: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return (value - self.low) / span * self.size


def number(value: float) -> str:
    """Return a number for a label.

    >>> number(0.000123456), number(1234.5), number(-0.0), number(12)
    ('0.000123', '1.23e+03', '0', '12')
    """
    return f"{value:.3g}" if value else "0"


def draw_histogram(
    counts: Sequence[int],
    low: float,
    high: float,
    marks: Sequence[Mark],
    *,
    title: str,
) -> Markup:
    """Return a histogram with marks at the ends of ranges.

    Args:
        counts: in equal bins. Their heights are logarithmic. low: the left end of the first
        bin. high: the right end of the last bin. marks: the marks. Those of kind "other" with
        the same label have their labels in the same row.
        title: of the drawing.
    """
    height = 96
    ends = [low, high, *(mark.value for mark in marks)]
    scale = _Scale(min(ends), max(ends), _WIDTH)
    bin_width = (high - low) / len(counts)
    highest = math.log1p(max(counts, default=0)) or 1.0
    tops = []
    for count in counts:
        share = math.log1p(count) / highest
        tops.append(height * (1 - share))
    left = scale(low)
    outline = _bar_outline(tops, scale(low + bin_width) - left)
    path = f"M{left:.1f} {height}{outline}V{height}Z"
    label_rows: dict[str, int] = {}
    drawn_marks = []
    for mark in marks:
        if mark.kind == "other":
            label_rows.setdefault(mark.label, len(label_rows) + 1)
        row = label_rows.get(mark.label, 0)
        drawn_marks.append(_mark(mark, scale(mark.value), height, row))
    return _drawing(
        height + 34,
        title,
        element("path", d=path, class_="bars"),
        drawn_marks,
        _axis(scale, height),
    )


def _mark(mark: Mark, x: float, height: int, row: int) -> Markup:
    anchor = "start"
    label_x = x + 4
    if x > _WIDTH / 2:
        anchor = "end"
        label_x = x - 4
    label = element(
        "text",
        mark.label,
        x=f"{label_x:.1f}",
        y=10 + 11 * row,
        text_anchor=anchor,
    )
    line = element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=height)
    return element("g", line, label, class_=f"mark {mark.kind}")


def _axis(scale: _Scale, height: int) -> Markup:
    line = element("line", x1=0, x2=_WIDTH, y1=height, y2=height, class_="axis")
    anchors = {
        "start": scale.low,
        "middle": (scale.low + scale.high) / 2,
        "end": scale.high,
    }
    texts = []
    for anchor, value in anchors.items():
        text = element(
            "text",
            number(value),
            x=f"{scale(value):.1f}",
            y=height + 16,
            text_anchor=anchor,
        )
        texts.append(text)
    return fragment(line, texts)


@dataclass(frozen=True)
class _PointSet:
    """The points of one kind in a plot, drawn as a line, as circles, or as both."""

    label: str
    kind: str
    points: Sequence[Point]
    has_line: bool = True
    has_points: bool = True


def _plot(
    point_sets: Sequence[_PointSet],
    ends: tuple[float, float],
    *,
    title: str,
    height: int,
) -> Markup:
    """Return a plot with a legend at the top and a vertical axis on the left.

    Args:
        point_sets: the points to draw.
        ends: the least and the greatest x.
        title: of the drawing.
        height: of the plot without the legend.
    """
    values = []
    for point_set in point_sets:
        values += [point.y for point in point_set.points]
    width = _WIDTH - _LEFT - _RIGHT
    across = _Scale(*ends, width)
    up = _Scale(min(0.0, *values), max(values), height)
    bottom = _TOP + height
    legend_step = width / max(2, len(point_sets))
    legend = []
    drawn = []
    for index, point_set in enumerate(point_sets):
        kind = point_set.kind
        label_x = _LEFT + index * legend_step
        legend.append(element("text", f"■ {point_set.label}", x=label_x, y=10, class_=kind))
        corners = []
        circles = []
        for point in point_set.points:
            x = f"{_LEFT + across(point.x):.1f}"
            y = f"{bottom - up(point.y):.1f}"
            corners.append(f"{x},{y}")
            label = element("title", point.label)
            circles.append(element("circle", label, cx=x, cy=y, r=2.5, class_=kind))
        if point_set.has_line:
            drawn.append(element("polyline", points=" ".join(corners), class_=kind))
        if point_set.has_points:
            drawn += circles
    ticks = [_tick(value, bottom - up(value)) for value in _ticks(up.low, up.high)]
    return _drawing(bottom + 8, title, legend, ticks, drawn)


def _tick(value: float, y: float) -> Markup:
    line_y = f"{y:.1f}"
    right = _WIDTH - _RIGHT
    line = element("line", x1=_LEFT, x2=right, y1=line_y, y2=line_y, class_="grid")
    text = element("text", number(value), x=34, y=f"{y + 4:.1f}", text_anchor="end")
    return fragment(line, text)


def draw_lines(
    series: Sequence[Series],
    names: Sequence[str],
    unit: str,
    *,
    title: str,
    height: int = 150,
    has_points: bool = True,
) -> Markup:
    """Return lines of values by position, or empty markup if there is no value.

    Args:
        series: the lines. names: of the positions. unit: of the values. title: of the drawing.
        height: of the plot without the legend. has_points: whether values are also drawn as
        circles, which show the name of the position when the mouse is over them.
    """
    point_sets = []
    is_empty = True
    for line in series:
        points = []
        for position, value in enumerate(line.values):
            if value is not None:
                label = f"{names[position]}: {number(value)} {unit}"
                points.append(Point(position, value, label))
                is_empty = False
        point_sets.append(_PointSet(line.label, line.kind, points, has_points=has_points))
    if is_empty:
        return Markup("")
    last = max(1, len(names) - 1)
    return _plot(point_sets, (0, last), title=title, height=height)


def draw_curve(
    points: Sequence[Point],
    others: Sequence[Point],
    names: tuple[str, str],
    *,
    title: str,
) -> Markup:
    """Return points that are joined by a line, and other points.

    Args:
        points: of the line.
        others: further points.
        names: of the line and of the other points, for the legend.
        title: of the drawing.
    """
    positions = [point.x for point in (*points, *others)]
    point_sets = [
        _PointSet(names[0], "first", points),
        _PointSet(names[1], "second", others, has_line=False),
    ]
    return _plot(point_sets, (min(positions), max(positions)), title=title, height=150)


def draw_strip(
    lows: Sequence[float],
    highs: Sequence[float],
    *,
    title: str,
) -> Markup:
    """Return the range of each channel as a bar, channel by channel."""
    height = 60
    up = _Scale(min(0.0, *lows), max(0.0, *highs), height)
    width = _WIDTH / len(lows)
    zero = height - up(0.0)
    upper = _bar_outline([height - up(high) for high in highs], width)
    lower = _bar_outline([height - up(low) for low in reversed(lows)], -width)
    path = f"M0 {zero:.0f}{upper}{lower}Z"
    y = f"{zero:.1f}"
    return _drawing(
        height,
        title,
        element("path", d=path, class_="bars"),
        element("line", x1=0, x2=_WIDTH, y1=y, y2=y, class_="grid"),
    )


def _bar_outline(heights: Iterable[float], width: float) -> str:
    """Return the upper edge of adjacent bars as part of an SVG path. Adjacent bars of the same
    height are one step, which makes the path shorter.

    >>> _bar_outline([5, 5, 2.04], 3)
    'V5h6V2h3'
    """
    path = ""
    for height, run in itertools.groupby(heights, key="{:.1f}".format):
        run_width = width * len(list(run))
        path += f"V{_without_zeros(height)}h{_without_zeros(f'{run_width:.2f}')}"
    return path


def _without_zeros(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".")


def _drawing(
    height: int,
    title: str,
    *parts: Markup | Iterable[Markup],
) -> Markup:
    return element(
        "svg",
        element("title", title),
        *parts,
        viewBox=f"0 0 {_WIDTH} {height}",
        role="img",
        aria_label=title,
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values between `low` and `high`, for an axis.

    >>> _ticks(0, 47)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    rough_step = ((high - low) or 1.0) / 5
    step = 10.0 ** math.floor(math.log10(rough_step))
    # The step becomes 1, 2, 5 or 10 times a power of ten
    for factor in (2, 2.5, 2):
        if step < rough_step:
            step *= factor
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [step * index for index in range(first, last + 1)]
