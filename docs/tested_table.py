"""Write the README's table of what was tested, from the marks `shows` of the tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_START = "<!-- tested: written by docs/generate.py from the marks `shows` of tests/ -->\n"
_END = "<!-- end of tested -->\n"
_HEAD = "| model | is run by | test |\n|---|---|---|\n"


def with_table(readme: str, tests: Path) -> str:
    """Return the README with a row for each mark `shows(model, engines)` of a test, trained
    models first.
    """
    before, _, rest = readme.partition(_START)
    _, _, after = rest.partition(_END)
    rows = []
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests.parent).as_posix()
        for model, engines in _shown(path.read_text("utf-8")):
            rows.append(f"| {model} | {engines} | [{path.stem}]({name}) |\n")
    rows.sort(key=lambda row: ("(random)" in row, row))
    return "".join([before, _START, _HEAD, *rows, _END, after])


def _shown(source: str) -> Iterator[tuple[str, str]]:
    """Yield model and engines of each mark `shows` in the source of tests."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "shows":
            model, engines = (ast.literal_eval(argument) for argument in node.args)
            yield model, engines
