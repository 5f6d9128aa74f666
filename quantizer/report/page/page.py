"""report.html: the content of report.json on one page, which is complete without its script."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

from quantizer.report.page import sections
from quantizer.report.page.figures import styles
from quantizer.report.page.html import Markup, element

Section = Callable[[dict[str, Any]], Markup | None]
SECTIONS: dict[str, tuple[str, Section]] = {
    "outputs": ("Outputs", sections.outputs),
    "layers": ("Layers by damage", sections.layers),
    "depth": ("Error along the network", sections.depth),
    "activations": ("Activations: values and ranges", sections.activations),
    "weights": ("Weights: ranges of channels", sections.weights),
    "data": ("Is the calibration set enough?", sections.sufficiency),
    "coverage": ("Coverage", sections.coverage),
    "algorithms": ("What algorithms gained", sections.algorithms),
    "sensitivity": ("Sensitivity and size", sections.sensitivity),
    "config": ("Config", sections.config),
    "reproduce": ("How to reproduce", sections.reproduce),
}
"""By the name that a link has, in the order of the page; one that has nothing to show is left
out.
"""


def page(content: dict[str, Any]) -> str:
    """The whole file."""
    shown = {
        name: (title, made)
        for name, (title, make) in SECTIONS.items()
        if (made := make(content)) is not None
    }
    title = f"{content['model']}: quantization report"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(styles() + _file("page.css"))),
    )
    links = element(
        "nav",
        [element("a", text, href=f"#{name}") for name, (text, _) in shown.items()],
        aria_label="Sections",
    )
    parts = [
        element("section", element("h2", text), made, id=name)
        for name, (text, made) in shown.items()
    ]
    body = element(
        "body",
        element("header", element("h1", content["model"]), sections.verdict(content), links),
        element("main", parts),
        element("script", Markup(_file("page.js"))),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _file(name: str) -> str:
    return resources.files("quantizer.report.page").joinpath(name).read_text(encoding="utf-8")
