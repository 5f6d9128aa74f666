"""A small network through each target, in the engines of the project's own environment, with
the programs of `make engines`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

pytest.importorskip("sklearn", reason="the program imports photos (extra: examples)")

RUNS = {
    "onnxruntime": ("digits", 60),
    "openvino": ("digits", 35),
    "torch": ("digits", 60),
    "transformers": ("llama", 50),
    "llama_cpp": ("llama", 25),
}
"""An engine, the network, and the least SQNR in dB against test mode."""


@pytest.mark.real
@pytest.mark.parametrize("engine", RUNS)
def test_an_engine_computes_what_test_mode_does(engine: str, tmp_path: Path) -> None:
    network, least_db = RUNS[engine]
    package = {"llama_cpp": "xllamacpp"}.get(engine, engine)
    pytest.importorskip(package, reason="the engine")
    program = ROOT / "benchmarks" / "engines" / "run.py"
    command = [sys.executable, str(program), "--engine", engine, "--network", network]
    command += ["--rounds", "1", "--results", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    (row,) = json.loads((tmp_path / f"{engine}.json").read_text("utf-8"))["rows"]
    assert row.get("failure", "") == ""
    assert row.get("sqnr_db", 1000) >= least_db
