"""Write report.html: the content of report.json on one page, complete without its script."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from quantizer.report.page import figures, sections
from quantizer.report.page.charts import number
from quantizer.report.page.html import Markup
from quantizer.report.page.rows import in_order, name_of, severity, value_text

if TYPE_CHECKING:
    from jinja2 import Environment

SECTIONS = {
    "outputs": "Outputs",
    "layers": "Layers by damage",
    "depth": "Error along the network",
    "activations": "Activations: values and ranges",
    "weights": "Weights: ranges of channels",
    "data": "Is the calibration set enough?",
    "coverage": "Coverage",
    "algorithms": "What algorithms gained",
    "sensitivity": "Sensitivity and size",
    "config": "Config",
    "reproduce": "How to reproduce",
}
"""The titles of the sections in the order of the page, by the name of their template, which is
also the name of their link.
"""
DRAWN_AT_MOST = 40
"""Tensors whose curves over batches are drawn: those that become stable last."""


def page(content: dict[str, Any]) -> str:
    """Return the whole file. A section that has nothing to show is left out."""
    environment = _environment()
    shown = {
        "content": content,
        "figures": figures,
        "verdict": sections.verdict(content),
        "key_figures": sections.key_figures(content),
        "warned_outputs": sections.warned_outputs(content),
    }
    parts: list[tuple[str, str, Markup]] = []
    for name, title in SECTIONS.items():
        text = environment.get_template(f"sections/{name}.html").render(shown).strip()
        if text:
            parts.append((name, title, Markup(text)))
    style = Markup(figures.styles() + _file("page.css"))
    script = Markup(_file("page.js"))
    template = environment.get_template("page.html")
    return template.render(shown, sections=parts, style=style, script=script) + "\n"


@cache
def _environment() -> Environment:
    """Return the templates with the functions that they call."""
    # Takes a tenth of a second to import, which commands without a report need not wait for.
    from jinja2 import Environment, PackageLoader, pass_context

    environment = Environment(
        loader=PackageLoader("quantizer.report.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "module_path": pass_context(_module_path),
        "number": number,
        "percent": lambda share: _scaled(share, 100),
        "kilobytes": lambda size: _scaled(size, 1e-3),
        "severity": severity,
        "channel_facts": sections.channel_facts,
        "value_text": value_text,
    }
    environment.tests["still_changes"] = sections.still_changes
    environment.globals |= {
        "in_order": in_order,
        "steepest_fall": sections.steepest_fall,
        "last_to_be_stable": sections.last_to_be_stable,
        "stable_after": sections.stable_after,
        "coverage": sections.coverage,
        "remarks": sections.remarks,
        "width_titles": sections.width_titles,
        "drawn_at_most": DRAWN_AT_MOST,
    }
    return environment


def _module_path(context: Mapping[str, Any], layer: str) -> str:
    return name_of(context["content"], layer)


def _scaled(value: Any, factor: float) -> float | None:
    """Return a number times `factor`; None for what is missing or not measured."""
    if isinstance(value, (int, float)):
        return value * factor
    return None


def _file(name: str) -> str:
    return resources.files("quantizer.report.page").joinpath(name).read_text(encoding="utf-8")
