"""docs/engine_results.md shows what `make engines` measured: each engine has a result for each network,
and a row or a reason on the page.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from support.runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from engines.table import ENGINES, NETWORKS, Engine

from quantizer.export.targets import EXPORTERS

HARNESS = ROOT / "benchmarks" / "engines"
PAGE = (ROOT / "docs" / "engine_results.md").read_text("utf-8")
ALL_ENGINES = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def results(engine: Engine) -> dict[str, dict[str, Any]]:
    """Return the results of an engine by network."""
    content = json.loads((HARNESS / "results" / f"{engine.name}.json").read_text("utf-8"))
    return {row["network"]: row for row in content["rows"]}


@ALL_ENGINES
def test_an_engine_has_a_result_for_each_network(engine: Engine) -> None:
    rows = results(engine)
    assert [*rows] == [*NETWORKS], f"make engines ENGINES='--engine {engine.name}'"
    for name, row in rows.items():
        if name in engine.cannot_hold:
            assert row["cannot_hold"] == engine.cannot_hold[name]
        elif "failure" not in row:
            assert row["version"] and row["date"], row
            assert "float_db" in row or row["kept"] == row["weights"] > 0, row


@ALL_ENGINES
def test_the_page_has_a_row_or_a_message_for_each_network(engine: Engine) -> None:
    options = "".join(f" --{name} {value}" for name, value in engine.options.items())
    (section,) = [
        text
        for text in PAGE.split("\n## ")
        if text.startswith(f"{engine.title} ")
        and text.partition("\n")[0].endswith(f": `{engine.target}{options}`")
    ]
    for name, row in results(engine).items():
        if "version" in row:
            assert f" {row['version']}" in section.partition("\n")[0]
        shown = f"| {NETWORKS[name]} |"
        if "failure" in row:
            shown = row["failure"].replace("`", "")
        elif "cannot_hold" in row:
            shown = row["cannot_hold"]
        assert shown in section


@ALL_ENGINES
def test_a_row_names_a_target_its_options_and_a_program(engine: Engine) -> None:
    options = {option.name: option.values for option in EXPORTERS[engine.target].options}
    for name, value in engine.options.items():
        assert value in options[name]
    program = HARNESS / "consumers" / engine.consumer
    assert program.exists()
    assert find_spec(program.stem) is None, "Python would import the program for the package"


def test_each_file_of_results_is_that_of_an_engine() -> None:
    files = {path.stem for path in (HARNESS / "results").glob("*.json")}
    assert files == {engine.name for engine in ENGINES}
