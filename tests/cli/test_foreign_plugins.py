"""Plug-ins of other packages are found by their entry points; a broken one costs a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ledger import PACKAGE

_GOOD = """
from quantizer.declarations import ExportTarget, Plugin, TargetOption

print("imported", flush=True)
_LEVEL = TargetOption("tiny_level", "tiny", "How tiny.", ("low", "high"))
_TARGET = ExportTarget("tiny_engine:TinyExporter", ".tiny", "tiny", ("absent_package",), "tiny",
                       options=(_LEVEL,))
PLUGIN = Plugin("tiny", targets={"tiny": _TARGET})
"""


def installed(folder: Path, code: str) -> Path:
    """Install a package with a plug-in into a folder."""
    metadata = folder / "tiny_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[quantizer.plugins]\ntiny = tiny_engine:PLUGIN\n"
    )
    (folder / "tiny_engine.py").write_text(code)
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(PACKAGE.parent), str(folder)))
    return subprocess.run(
        [sys.executable, "-m", "quantizer", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        check=False,
    )


def test_a_plugin_adds_its_target_and_option(tmp_path: Path) -> None:
    folder = installed(tmp_path, _GOOD)
    shown = run(folder, "--help")
    assert shown.returncode == 0
    assert "gguf, tiny." in " ".join(shown.stdout.split())
    assert "--tiny_level [low|high]" in shown.stdout
    wrong = run(folder, "--quant_mode", "test", "--deploy", "tiny", "--tiny_level", "none")
    assert wrong.returncode == 2
    assert "did you mean" in wrong.stderr or "known are low, high" in wrong.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('worn out')", "RuntimeError: worn out"),
        ("PLUGIN = 3", "tiny_engine:PLUGIN is not a Plugin"),
        (
            "from quantizer.declarations import Plugin\nPLUGIN = Plugin('gguf')",
            "the plug-in gguf is left out: the name gguf is of another plug-in already",
        ),
        (
            "from quantizer.declarations import CheckedTarget, Plugin\n"
            "PLUGIN = Plugin('tiny', profiles={'npu': CheckedTarget('onnx')})",
            "the plug-in tiny is left out: npu is of another plug-in already",
        ),
    ],
)
def test_a_broken_plugin_is_one_warning(code: str, reason: str, tmp_path: Path) -> None:
    shown = run(installed(tmp_path, code), "--help")
    assert shown.returncode == 0
    [line] = shown.stderr.splitlines()
    assert reason in line


@pytest.mark.parametrize("words", [["validate"], ["--color", "never", "-q", "validate"]])
def test_validate_imports_no_plugin_of_others(words: list[str], tmp_path: Path) -> None:
    folder = installed(tmp_path, _GOOD)
    done = run(folder, *words, str(PACKAGE.parent / "configs" / "cpu_int8.json"))
    assert done.returncode == 0
    assert "imported" not in done.stdout
