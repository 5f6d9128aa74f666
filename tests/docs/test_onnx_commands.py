"""docs/onnx.md: from the README's model to an .onnx file that runs in 8 bits, in five
commands, run as written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.documented import Commands
from support.runs import ROOT

from quantizer.export.targets import EXPORTERS

MODEL = re.findall(
    r"```python\n(# my_model\.py.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
)[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for package in EXPORTERS["onnx"].needs:
        pytest.importorskip(package, reason="needs quantizer-torch[onnx]")
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path


@pytest.mark.slow
def test_five_commands_run_in_eight_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands.under("onnx.md", "## In one command")
    assert commands.extra in (".[onnx]", "quantizer-torch[onnx]")
    commands.quantize()
    assert "2 of 2 multiplications in int8" in capsys.readouterr().out
    commands.end()
    assert "dtype=float32" in capsys.readouterr().out
