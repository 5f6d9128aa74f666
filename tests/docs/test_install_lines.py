"""What readers are told to install is the distribution's name with an extra that it has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "quantizer", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*")
    ),
]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def test_extras_are_those_of_the_distribution() -> None:
    named = [
        found
        for path in TEXTS
        if path.suffix in (".md", ".py")
        for found in re.findall(r"([\w-]+)\[([a-z]+)\](?=['`])", path.read_text("utf-8"))
        if found[0] in ("quantizer", "quantizer-torch")
    ]
    extras = set(
        re.findall(
            r"^(\w+) = \[",
            PROJECT.partition("[project.optional-dependencies]")[2],
            re.MULTILINE,
        )
    )
    assert {("quantizer-torch", "torch"), ("quantizer-torch", "onnx")} <= set(named)
    assert {name for name, _ in named} == {"quantizer-torch"}
    assert {extra for _, extra in named} <= extras
