"""A small network through each target, in the engines of the project's own environment, with
the program of `make engines`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.runs import ROOT

for package in ("sklearn", "openvino", "transformers", "xllamacpp"):
    pytest.importorskip(package, reason="the program imports it, or it is an engine")

RUNS = {"digits": ("onnxruntime", "openvino", "torch"), "llama": ("transformers", "llama_cpp")}
"""A network and its engines."""

LEAST_DB = {"onnxruntime": 60, "openvino": 35, "torch": 60, "transformers": 35, "llama_cpp": 25}
"""The least SQNR against test mode. The LLaMA spreads each other rounding to later tokens."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the row of each engine."""
    folder = tmp_path_factory.mktemp("results")
    program = ROOT / "benchmarks" / "engines" / "run.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    collected: dict[str, dict[str, Any]] = {}
    for network, engines in RUNS.items():
        command = [sys.executable, str(program), "--network", network, "--engine", *engines]
        command += ["--rounds", "1", "--results", str(folder)]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        for engine in engines:
            (row,) = json.loads((folder / f"{engine}.json").read_text("utf-8"))["rows"]
            collected[engine] = row
    return collected


@pytest.mark.real
@pytest.mark.parametrize("engine", LEAST_DB)
def test_an_engine_computes_what_test_mode_does(
    engine: str, rows: dict[str, dict[str, Any]]
) -> None:
    row = rows[engine]
    assert row.get("failure", "") == ""
    # Equal outputs have no figure.
    assert row.get("sqnr_db", 1000) >= LEAST_DB[engine]
