"""Write report.html: the content of report.json on one page, complete without its script."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from quantizer.config.json_types import JsonMapping
from quantizer.report.html import Markup, fragment, with_code
from quantizer.report.page import figures, sections, summary
from quantizer.report.page.axes import number
from quantizer.report.page.figures import page_file
from quantizer.report.page.sections import layer_columns, layers_legend
from quantizer.report.rows import layer_name, rows_in_order, severity, value_text
from quantizer.report.view import TableView

if TYPE_CHECKING:
    from jinja2 import Environment

SECTIONS = {
    "outputs": "Outputs",
    "exports": "Exported files",
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
"""The titles of the sections in the order of the page. A key is the name of the template, and
of the link to the section.
"""
_MAX_DRAWN = 40
"""The most tensors whose curves over batches are drawn. They are those that become stable
last.
"""


def page(content: JsonMapping) -> str:
    """Return the whole file. A section that has nothing to show is left out."""
    environment = _environment()
    parts = []
    for name, title in SECTIONS.items():
        section = environment.get_template(f"sections/{name}.html")
        text = section.render(content=content).strip()
        if text:
            parts.append((name, title, Markup(text)))
    html = environment.get_template("page.html").render(
        content=content,
        parts=parts,
        style=Markup(page_file("drawing.css") + page_file("page.css")),
        script=Markup(page_file("page.js")),
    )
    return html + "\n"


@cache
def _environment() -> Environment:
    """Return the environment of the templates, with the functions that they call."""
    # Imported here, as it takes a tenth of a second
    from jinja2 import Environment, PackageLoader, pass_context

    environment = Environment(
        loader=PackageLoader("quantizer.report.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "module_path": pass_context(_module_path),
        "number": number,
        "percent": _percent,
        "severity": severity,
        "short_names": pass_context(_with_short_names),
        "with_code": with_code,
        "error_share": sections.error_share,
        "value_text": value_text,
    }
    environment.tests["still_changes"] = sections.still_changes
    environment.globals |= {
        "figures": figures,
        "sections": sections,
        "summary": summary,
        "layer_columns": layer_columns,
        "layers_legend": layers_legend,
        "rows_in_order": rows_in_order,
        "drawn_at_most": _MAX_DRAWN,
    }
    return environment


def _module_path(context: JsonMapping, layer: str) -> str:
    return layer_name(context["content"], layer)


def _breakable(path: str) -> Markup:
    """Return the path of a module, which a browser may break behind its dots."""
    return Markup(fragment(path).replace(".", ".<wbr>"))


def _with_short_names(context: JsonMapping, text: str) -> str:
    """Return a sentence with the module paths of layers instead of their exact names."""
    return TableView(context["content"]["paths"]).text(text)


def _percent(share: Any) -> float | None:
    """Return a share in percent; None for what is missing or not measured."""
    return 100.0 * share if isinstance(share, (int, float)) else None
