"""Commands that read results use the graph in the folder and trace nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import fresh_processes
from support.fresh_processes import COMMANDS
from support.runs import DIGITS, EXAMPLE, ROOT, check

from quantizer.cli.main import run_command
from quantizer.errors import ModelError
from quantizer.graph.tracing import trace as tracing


def refuse(*_args: Any, **_options: Any) -> None:
    raise ModelError("the model was traced")


def test_test_mode_finds_the_same_without_a_trace(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, value in (("read_graph", lambda _: None), (None, None)):
        with monkeypatch.context() as patched:
            if name is None:
                patched.setattr(tracing, "_export", refuse)
            else:
                patched.setattr(f"quantizer.results.graph_file.{name}", value)
            assert check(calibrated, "--deploy", "safetensors") == 0
        files = ("layers.csv", "report.json", "export/ResNet.safetensors")
        found.append([(calibrated / file).read_bytes() for file in files])
    assert found[0] == found[1]


def test_analyze_adds_to_a_report_without_a_trace(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_export", refuse)
    given = ["--config_file", EXAMPLE, "--model", DIGITS, "--subset_len", "16", "--json"]
    assert run_command(["analyze", *given, "--report", str(calibrated)]) == 0


@pytest.mark.slow
def test_test_mode_imports_no_tracer(tmp_path: Path) -> None:
    run = (
        "import sys\n"
        "from quantizer.cli.main import run_command\n"
        "assert run_command(sys.argv[1:]) == 0\n"
    )
    code = (
        f"{run}"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert 'torch.export._trace' not in sys.modules\n"
        "assert 'quantizer.cli.modes.calib_mode' not in sys.modules\n"
    )
    given = ["--model", DIGITS, "--output_dir", str(tmp_path), "-q", "--subset_len", "64"]
    # Both processes have loaded the same files of tests
    calibration = [run, "--quant_mode", "calib", "--config_file", EXAMPLE, *given]
    made = fresh_processes.run(*calibration, cwd=ROOT, begins_with=COMMANDS)
    assert made.returncode == 0, made.stderr
    given += ["--quant_mode", "test"]
    done = fresh_processes.run(code, *given, cwd=ROOT, begins_with=COMMANDS)
    assert done.returncode == 0, done.stderr
