"""Draw histograms, lines, points and strips of channels as SVG."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantizer.printable import Markup, element
from quantizer.report.page.axes import (
    DATA_WIDTH,
    ROW,
    Axes,
    Scale,
    Tick,
    hover,
    number,
    round_ticks,
    three_ticks,
)

_HISTOGRAM_HEIGHT = 96
_STRIP_HEIGHT = 80
_LABEL_BASELINE = 17
"""From the top of the row of a range to the baseline of its label."""
_BRACKET = 22
"""From the top of the row of a range to its line."""
_MAX_COUNT_TICKS = 3
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class DrawnRange:
    """A range of values in a histogram: a line from end to end with a label."""

    low: float
    high: float
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


def draw_histogram(
    counts: Sequence[int], low: float, high: float, ranges: Sequence[DrawnRange], *, title: str
) -> Markup:
    """Return a histogram, with ranges above it.

    Args:
        counts: in equal bins. Their heights are logarithmic.
        low: the left end of the first bin.
        high: the right end of the last bin.
        ranges: each has a row of its own. Those of kind "other" are cut off at the ends of the
            drawing.
        title: of the drawing.
    """
    ends = [low, high]
    for drawn in ranges:
        if drawn.kind != "other":
            ends += [drawn.low, drawn.high]
    bin_width = (high - low) / len(counts)
    most = max(counts, default=0)
    scale = Scale(min(ends), max(ends), DATA_WIDTH)
    axes = Axes(
        "value →",
        "↑ how many values, logarithmic",
        scale,
        Scale(0.0, math.log1p(most) or 1.0, _HISTOGRAM_HEIGHT),
        x_ticks=three_ticks(scale.low, scale.high),
        y_ticks=_count_ticks(most),
        legend=[("values in the calibration data", "bars")],
        rows=len(ranges),
    )
    tops = [axes.up(math.log1p(count)) for count in counts]
    left = axes.across(low)
    width = axes.across(low + bin_width) - left
    path = f"M{left:.1f} {axes.bottom:.1f}{_bar_outline(tops, width)}V{axes.bottom:.1f}Z"
    positions = []
    texts = []
    for index, count in enumerate(counts):
        positions.append(left + width * (index + 0.5))
        texts.append(f"{number(low + bin_width * (index + 0.5))}: {count}")
    return axes.drawing(
        title,
        element("path", d=path, class_="bars"),
        [_range(drawn, axes, row) for row, drawn in enumerate(ranges)],
        hover=hover(positions, texts, "about {} values"),
    )


def _count_ticks(most: int) -> list[Tick]:
    """Return powers of ten up to a count, for a logarithmic axis.

    >>> [label for _, label in _count_ticks(123456)]
    ['1', '10²', '10⁴']
    """
    powers = range(len(str(most)) if most else 0)
    ticks = []
    for power in powers[:: math.ceil(len(powers) / _MAX_COUNT_TICKS) or 1]:
        label = f"10{str(power).translate(_SUPERSCRIPTS)}" if power > 1 else str(10**power)
        ticks.append((math.log1p(10**power), label))
    return ticks


def _range(drawn: DrawnRange, axes: Axes, row: int) -> Markup:
    """Return a line from end to end of a range, its label, and lines down through the bars."""
    first = axes.across(max(drawn.low, axes.x.low))
    last = axes.across(min(drawn.high, axes.x.high))
    top = axes.rows_top + ROW * row
    y = f"{top + _BRACKET:.1f}"
    middle = axes.across((axes.x.low + axes.x.high) / 2)
    label = element("text", drawn.label, x=f"{middle:.1f}", y=f"{top + _LABEL_BASELINE:.1f}")
    parts = [label, element("line", x1=f"{first:.1f}", x2=f"{last:.1f}", y1=y, y2=y)]
    for x, value in ((first, drawn.low), (last, drawn.high)):
        if axes.x.low <= value <= axes.x.high:
            line = element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=y, y2=axes.bottom)
            parts.append(line)
    return element("g", parts, class_=f"range {drawn.kind}")


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
    axis_names: tuple[str, str],
    *,
    title: str,
    height: int,
) -> Markup:
    """Return a plot.

    Args:
        point_sets: the points to draw.
        ends: the least and the greatest x.
        axis_names: of the horizontal and the vertical axis.
        title: of the drawing.
        height: of the area of the points.
    """
    values = [point.y for point_set in point_sets for point in point_set.points]
    up = Scale(min(0.0, *values), max(0.0, *values), height)
    axes = Axes(
        *axis_names,
        Scale(*ends, DATA_WIDTH),
        up,
        x_ticks=three_ticks(*ends),
        y_ticks=round_ticks(up),
        legend=[(point_set.label, point_set.kind) for point_set in point_sets],
    )
    texts_by_position: dict[float, list[str]] = {}
    drawn = []
    for point_set in point_sets:
        corners = []
        circles = []
        for point in point_set.points:
            x = axes.across(point.x)
            y = axes.up(point.y)
            corners.append(f"{x:.1f},{y:.1f}")
            circle = element(
                "circle",
                element("title", point.label),
                r=3,
                class_=point_set.kind,
                cx=f"{x:.1f}",
                cy=f"{y:.1f}",
            )
            circles.append(circle)
            texts_by_position.setdefault(x, []).append(point.label)
        if point_set.has_line:
            drawn.append(element("polyline", points=" ".join(corners), class_=point_set.kind))
        if point_set.has_points:
            drawn += circles
    positions = sorted(texts_by_position)
    texts = [_joined(texts_by_position[position]) for position in positions]
    return axes.drawing(title, drawn, hover=hover(positions, texts))


def _joined(labels: Sequence[str]) -> str:
    """Return the labels of points at one position, with what they begin with only once.

    >>> _joined(["relu: local 40 dB", "relu: accumulated 30 dB"])
    'relu: local 40 dB, accumulated 30 dB'
    """
    first, *others = labels
    head, colon, _ = first.partition(": ")
    return ", ".join([first, *(label.removeprefix(head + colon) for label in others)])


def draw_lines(
    series: Sequence[Series],
    names: Sequence[str],
    unit: str,
    *,
    title: str,
    axis_names: tuple[str, str],
    height: int = 150,
    has_points: bool = True,
    positions: Sequence[int] | None = None,
) -> Markup:
    """Return lines of values by position, or empty markup if there is no value.

    Args:
        series: the lines.
        names: of the positions, for the texts that are shown when the mouse is over them.
        unit: of the values.
        title: of the drawing.
        axis_names: of the horizontal and the vertical axis.
        height: of the area of the lines.
        has_points: whether values are also drawn as circles.
        positions: along the horizontal axis, ascending; by default 1, 2, 3 ...
    """
    if positions is None:
        positions = range(1, len(names) + 1)
    point_sets = []
    for line in series:
        what = line.label.partition(":")[0]
        points = []
        for position, name, value in zip(positions, names, line.values, strict=True):
            if value is not None:
                label = f"{name}: {what} {number(value)} {unit}".rstrip()
                points.append(Point(position, value, label))
        point_sets.append(_PointSet(line.label, line.kind, points, has_points=has_points))
    if not any(point_set.points for point_set in point_sets):
        return Markup("")
    ends = (positions[0], positions[-1])
    return _plot(point_sets, ends, axis_names, title=title, height=height)


def draw_curve(
    points: Sequence[Point],
    others: Sequence[Point],
    names: tuple[str, str],
    *,
    title: str,
    axis_names: tuple[str, str],
) -> Markup:
    """Return points that are joined by a line, and other points.

    Args:
        points: of the line.
        others: further points.
        names: of the line and of the other points, for the legend.
        title: of the drawing.
        axis_names: of the horizontal and the vertical axis.
    """
    positions = [point.x for point in (*points, *others)]
    point_sets = [
        _PointSet(names[0], "first", points),
        _PointSet(names[1], "second", others, has_line=False),
    ]
    ends = (min(positions), max(positions))
    return _plot(point_sets, ends, axis_names, title=title, height=150)


def draw_strip(channels: Mapping[str, Sequence[float]], count: int, *, title: str) -> Markup:
    """Return the range of each channel as a bar, channel by channel.

    Args:
        channels: the "low" and the "high" end of each bar.
        count: the number of channels. If there are fewer bars, a bar stands for several.
        title: of the drawing.
    """
    lows = channels["low"]
    highs = channels["high"]
    run_length = math.ceil(count / len(lows))
    up = Scale(min(0.0, *lows), max(0.0, *highs), _STRIP_HEIGHT)
    what = "the channel" if run_length == 1 else f"{run_length} adjacent channels"
    axes = Axes(
        "channel →",
        "↑ value of the weights",
        Scale(0, len(lows), DATA_WIDTH),
        up,
        x_ticks=[(0, "1"), (len(lows), str(count))],
        y_ticks=round_ticks(up),
        legend=[(f"from the least to the greatest value of {what}", "bars")],
    )
    left = axes.across(0)
    width = DATA_WIDTH / len(lows)
    upper = _bar_outline([axes.up(high) for high in highs], width)
    lower = _bar_outline([axes.up(low) for low in reversed(lows)], -width)
    zero = axes.up(0.0)
    path = f"M{left:.0f} {zero:.0f}{upper}{lower}Z"
    positions = []
    texts = []
    for index, (low, high) in enumerate(zip(lows, highs, strict=True)):
        first = index * run_length + 1
        last = min(count, first + run_length - 1)
        channel = str(first) if first == last else f"{first} to {last}"
        positions.append(left + width * (index + 0.5))
        texts.append(f"{channel}: {number(low)} … {number(high)}")
    return axes.drawing(
        title,
        element("path", d=path, class_="bars"),
        hover=hover(positions, texts, "channel {}"),
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
