"""The notebooks in examples/: executed, and their cells still run, in order, and say what the
texts around them say.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from support.pages import is_shown

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.real


def cells(name: str) -> list[dict[str, Any]]:
    """Those with code."""
    content = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What they print, without a kernel: only displays need one."""
    display = types.ModuleType("IPython.display")
    display.SVG = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    sys.modules["IPython"].get_ipython = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    values: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for at, cell in enumerate(cells(name)):
            exec(compile("".join(cell["source"]), f"{name}, cell {at}", "exec"), values)
    return said.getvalue()


def stale(name: str, said: str) -> list[str]:
    """The stored lines that are not printed any more. Numbers may differ, and so may the speed
    of a file and the text that a trained model writes.
    """
    text = ""
    for cell in cells(name):
        for output in cell["outputs"]:
            text += "".join(output.get("text", ""))
    lines = []
    for line in text.partition("quantizer --quant_mode ")[0].splitlines():
        without_speed = re.sub(r"(multiplications in int8); .*", r"\1", line)
        if not is_shown(without_speed, said):
            lines.append(line)
    return lines


@pytest.mark.parametrize("name", ["cnn_to_int8_onnx", "language_model_to_w4"])
def test_they_are_stored_as_they_were_executed(name: str) -> None:
    found = cells(name)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    assert not any(
        output["output_type"] == "error" for cell in found for output in cell["outputs"]
    )
    assert sum(bool(cell["outputs"]) for cell in found) >= 4


def test_a_network_becomes_an_onnx_file_that_reads_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    said = run("cnn_to_int8_onnx", monkeypatch)
    assert stale("cnn_to_int8_onnx", said) == []
    (share,) = re.findall(r"^([\d.]+) of 100 pictures are right$", said, re.MULTILINE)
    assert float(share) > 0.98


def test_gptq_beats_rounding_to_nearest_and_the_checkpoint_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    said = run("language_model_to_w4", monkeypatch)
    assert stale("language_model_to_w4", said) == []
    nearest, gptq = (float(text) for text in re.findall(r"output SQNR ([\d.]+) dB", said))
    assert gptq > nearest + 3
    assert (
        said.splitlines()[-1].startswith("quantizer --quant_mode ")
        or "quantizer --quant_mode " in said
    )
