"""Plug-ins of other packages are found by their entry points; a broken one costs a warning."""

from __future__ import annotations

import json
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


_WORDS = """
from quantizer.declarations import Plugin
from quantizer.rows import NumberFormat, RangeMethod

_STEEP = NumberFormat(
    4, "uint8", 4.0, levels=(-4.0, -1.0, 0.0, 1.0, 4.0), group_size=16, meaning="steep"
)
_WHOLE = RangeMethod("tiny_engine:whole", "the whole range", reads="extremes")
PLUGIN = Plugin("tiny", formats={"steep4": _STEEP}, range_methods={"whole": _WHOLE})

def whole(values, spec):
    return values.low.double(), values.high.double()
"""
_CLASH = """
from quantizer.declarations import Plugin
from quantizer.graph.op_row import Op

ROWS = [Op("mine", "fusable", ("a.b",), ("mine",)), Op("relu", "fusable", ("a.c",), ("my_relu",))]
PLUGIN = Plugin("tiny", operators="tiny_engine:ROWS")
"""
_EACH = """
import json, sys
from quantizer.cli.main import run_command

print(json.dumps([run_command(words) for words in json.loads(sys.argv[1])]))
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
    return python(folder, "-m", "quantizer", *words)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(PACKAGE.parent), str(folder)))
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        check=False,
    )


def test_a_plugin_adds_its_target_and_option(tmp_path: Path) -> None:
    folder = installed(tmp_path, _GOOD)
    shown = run(folder, "test", "--to", "tiny", "--help")
    assert shown.returncode == 0
    assert "--tiny_level [low|high]" in shown.stdout
    assert "--tiny_level" not in run(folder, "test", "--help").stdout
    wrong = run(folder, "test", "--to", "tiny", "--tiny_level", "none")
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


def test_the_words_of_a_plugin_calibrate_and_results_with_them_need_it(tmp_path: Path) -> None:
    folder = installed(tmp_path / "site", _WORDS)
    model = ["--model", str(PACKAGE.parent / "examples" / "digits.py"), "--subset_len", "32"]
    layered = (PACKAGE.parent / "configs" / "cpu_int8.json").read_text("utf-8")
    weight = {"dtype": "steep4", "qscheme": "per_group", "group_size": 16, "ch_axis": 1}
    texts = {
        "whole": layered.replace('"method": "auto"', '"method": "whole"'),
        "steep4": json.dumps({"global_quant_config": {"weight": weight}}),
    }
    calibs, tests = [], []
    for word, text in texts.items():
        path = tmp_path / f"{word}.json"
        path.write_text(text, "utf-8")
        place = ["-o", str(tmp_path / word), *model]
        calibs.append(["--quant_mode", "calib", "--config_file", str(path), *place])
        tests.append(["--quant_mode", "test", *place])
    schemas = [["schema", "layered"], ["schema", "hierarchical"]]
    done = python(folder, "-c", _EACH, json.dumps([*schemas, *calibs]))
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * 4, done.stderr
    assert '"whole"' in done.stdout and '"steep4"' in done.stdout
    done = python(tmp_path, "-c", _EACH, json.dumps(tests))
    assert json.loads(done.stdout.splitlines()[-1]) == [5, 5], done.stderr
    for key, word in (("method", "whole"), ("dtype", "steep4")):
        assert f"quant_info.json has the {key} '{word}', which is not there" in done.stderr
        assert f"install the package whose plug-in adds {word}" in done.stderr


def test_operators_of_a_plugin_that_are_there_already_are_one_warning(tmp_path: Path) -> None:
    folder = installed(tmp_path, _CLASH)
    code = "from quantizer.graph.ops import OPS; assert 'mine' not in OPS"
    done = python(folder, "-c", code)
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("the operators of the plug-in tiny are left out") and "relu" in line
