"""Write a drawing of the report as an SVG file for light and dark pages."""

from __future__ import annotations

import re

from quantizer.printable import Markup
from quantizer.report.page.figures import page_file
from quantizer.report.page.plots import standalone


def in_both_schemes(drawing: Markup) -> str:
    """Return the content of an SVG file for light and dark colour schemes."""
    picture = standalone(drawing)
    light, _, others = page_file("drawing.css").partition("@media")
    dark, _, _ = others.partition("\n}\n")
    light_colours = dict(re.findall(r"--(\w+): (#\w+);", light))
    dark_colours = dict(re.findall(r"--(\w+): (#\w+);", dark))
    rules = style(picture)
    for name, colour in light_colours.items():
        rules = rules.replace(colour, dark_colours[name])
    paper = f"style + rect {{ fill: {dark_colours['back']}; }}\n"
    block = f"@media (prefers-color-scheme: dark) {{\n{rules}{paper}}}\n"
    return picture.replace("</style>", f"{block}</style>", 1)


def style(picture: str) -> str:
    """Return the style sheet of an SVG file."""
    return picture.partition("<style>")[2].partition("</style>")[0]
