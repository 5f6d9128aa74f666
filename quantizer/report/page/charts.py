"""Drawings in SVG: histograms, lines, points, strips of channels. They know no tensor and no
layer.

All are as wide as the column they stand in. Colours are those of the page's style, by class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantizer.report.page.html import Markup, element, fragment

WIDTH = 720
"""Of a drawing's own units."""
TOP = 22
"""Room for a legend."""


@dataclass(frozen=True)
class Mark:
    """A vertical line at a value: where a range ends."""

    value: float
    label: str
    kind: str = "other"


@dataclass(frozen=True)
class Series:
    """Values by position; None where there is none."""

    label: str
    values: Sequence[float | None]
    kind: str = "first"


def number(value: float) -> str:
    """For a label.

    >>> number(0.000123456), number(1234.5), number(-0.0), number(12)
    ('0.000123', '1.23e+03', '0', '12')
    """
    return f"{value + 0.0:.3g}" if value else "0"


def histogram(
    counts: Sequence[int], low: float, high: float, marks: Sequence[Mark], *, title: str
) -> Markup:
    """Counts in equal bins from `low` to `high`, their heights logarithmic, with marks above
    them.
    """
    height, ends = 96, [low, high, *(mark.value for mark in marks)]
    scale = _Scale(min(ends), max(ends), WIDTH)
    width = (high - low) / len(counts)
    most = math.log1p(max(counts, default=0)) or 1.0
    others = dict.fromkeys(mark.label for mark in marks if mark.kind == "other")
    rows = {mark.label: 0 for mark in marks} | {
        label: row for row, label in enumerate(others, 1)
    }
    tops = [height * (1 - math.log1p(count) / most) for count in counts]
    path = (
        f"M{scale(low):.1f} {height}{_steps(tops, scale(low + width) - scale(low))}V{height}Z"
    )
    return _drawing(
        (WIDTH, height + 34),
        title,
        element("path", d=path, class_="bars"),
        [_mark(mark, scale(mark.value), height, rows[mark.label]) for mark in marks],
        _axis(scale, height),
    )


def lines(
    series: Sequence[Series],
    names: Sequence[str],
    unit: str,
    *,
    title: str,
    height: int = 150,
    has_points: bool = True,
) -> Markup:
    """Values along positions, each with its name to read when pointed at, if it `has_points`;
    gaps where there is no value.
    """
    values = [value for each in series for value in each.values if value is not None]
    if not values:
        return Markup("")
    across, up = (
        _Scale(0, max(1, len(names) - 1), WIDTH - 60),
        _Scale(min(0.0, *values), max(values), height),
    )
    drawn = []
    for each in series:
        points = [
            (40 + across(at), TOP + height - up(value), name, value)
            for at, (name, value) in enumerate(zip(names, each.values, strict=True))
            if value is not None
        ]
        drawn.append(
            element(
                "polyline",
                points=" ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points),
                class_=each.kind,
            )
        )
        if has_points:
            drawn += [
                _point(x, y, f"{name}: {number(value)} {unit}", each.kind)
                for x, y, name, value in points
            ]
    ticks = [_tick(value, TOP + height - up(value)) for value in _ticks(up.low, up.high)]
    return _drawing((WIDTH, TOP + height + 8), title, _legend(series), ticks, drawn)


def _point(x: float, y: float, said: str, kind: str) -> Markup:
    return element(
        "circle", element("title", said), cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, class_=kind
    )


def _tick(value: float, y: float) -> Markup:
    line = element("line", x1=40, x2=WIDTH - 20, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid")
    return fragment(
        line, element("text", number(value), x=34, y=f"{y + 4:.1f}", text_anchor="end")
    )


@dataclass(frozen=True)
class Point:
    """A place of a drawing, and what it says when pointed at."""

    x: float
    y: float
    label: str


def curve(
    points: Sequence[Point], others: Sequence[Point], names: tuple[str, str], *, title: str
) -> Markup:
    """Points joined by a line, and others beside it; `names` says what either are."""
    every, height = [*points, *others], 150
    across = _Scale(min(p.x for p in every), max(p.x for p in every), WIDTH - 60)
    up = _Scale(min(0.0, *(p.y for p in every)), max(p.y for p in every), height)
    series = [
        Series(name, (), kind) for name, kind in zip(names, ("first", "second"), strict=True)
    ]
    drawn = [
        element(
            "polyline",
            points=" ".join(
                f"{40 + across(p.x):.1f},{TOP + height - up(p.y):.1f}" for p in points
            ),
            class_="first",
        )
    ]
    for kind, some in (("first", points), ("second", others)):
        drawn += [_point(40 + across(p.x), TOP + height - up(p.y), p.label, kind) for p in some]
    ticks = [_tick(value, TOP + height - up(value)) for value in _ticks(up.low, up.high)]
    return _drawing((WIDTH, TOP + height + 8), title, _legend(series), ticks, drawn)


def strip(lows: Sequence[float], highs: Sequence[float], *, title: str) -> Markup:
    """The range of each channel as a bar, channel by channel."""
    height = 60
    up = _Scale(min(0.0, *lows), max(0.0, *highs), height)
    width = WIDTH / len(lows)
    path = f"M0 {height - up(0.0):.0f}{_steps([height - up(high) for high in highs], width)}"
    path += f"{_steps([height - up(low) for low in reversed(lows)], -width)}Z"
    zero = f"{height - up(0.0):.1f}"
    return _drawing(
        (WIDTH, height),
        title,
        element("path", d=path, class_="bars"),
        element("line", x1=0, x2=WIDTH, y1=zero, y2=zero, class_="grid"),
    )


def _steps(heights: Sequence[float], width: float) -> str:
    """The upper or lower edge of bars of one width, as a path from where the pen is; equal ones
    are one step.

    >>> _steps([5, 5, 2.04], 3)
    'V5h6V2h3'
    """
    runs = (
        (height, len(list(run)))
        for height, run in itertools.groupby(f"{height:.1f}" for height in heights)
    )
    return "".join(
        f"V{_short(height)}h{_short(f'{width * count:.2f}')}" for height, count in runs
    )


def _short(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".")


@dataclass(frozen=True)
class _Scale:
    """From values to units of a drawing."""

    low: float
    high: float
    size: float

    def __call__(self, value: float) -> float:
        return (value - self.low) / ((self.high - self.low) or 1.0) * self.size


def _drawing(size: tuple[int, int], title: str, *parts: Markup | Iterable[Markup]) -> Markup:
    box = f"0 0 {size[0]} {size[1]}"
    return element(
        "svg", element("title", title), *parts, viewBox=box, role="img", aria_label=title
    )


def _mark(mark: Mark, x: float, height: int, row: int) -> Markup:
    anchor = "end" if x > WIDTH / 2 else "start"
    label = element(
        "text",
        mark.label,
        x=f"{x + (-4 if anchor == 'end' else 4):.1f}",
        y=10 + 11 * row,
        text_anchor=anchor,
    )
    line = element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=height)
    return element("g", line, label, class_=f"mark {mark.kind}")


def _axis(scale: _Scale, height: int) -> Markup:
    ends = ((scale.low, "start"), ((scale.low + scale.high) / 2, "middle"), (scale.high, "end"))
    texts = [
        element(
            "text", number(value), x=f"{scale(value):.1f}", y=height + 16, text_anchor=anchor
        )
        for value, anchor in ends
    ]
    return fragment(element("line", x1=0, x2=WIDTH, y1=height, y2=height, class_="axis"), texts)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values between two others.

    >>> _ticks(0, 47)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    rough = ((high - low) or 1.0) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _legend(series: Sequence[Series]) -> Markup:
    apart = (WIDTH - 60) / max(2, len(series))
    return fragment(
        element("text", f"■ {each.label}", x=40 + at * apart, y=10, class_=each.kind)
        for at, each in enumerate(series)
    )
