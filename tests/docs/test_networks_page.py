"""docs/networks.md: its models and commands run as they are written, and print what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.pages import commands_of

from quantizer.cli.main import run_command

pytest.importorskip("onnxruntime", reason="the page writes .onnx files (extra: onnx)")

PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text("utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def pattern(line: str) -> str:
    """The line with any digits, and any end after an ellipsis."""
    text = re.escape(line.removesuffix(" …")).replace(r"\.", ".")
    return re.sub(r"[\d.]+", r"[\\d.]+", text)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", SECTIONS)
def test_a_network_of_the_page_is_quantized(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", SECTIONS[name], re.S | re.M)
    code, command, shown = blocks
    file = code.splitlines()[0].removeprefix("# ")
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(code)
    (line,) = commands_of(command)
    program, *words = shlex.split(line)
    assert (program, run_command(words)) == ("quantizer", 0)
    printed = capsys.readouterr().out
    for expected in shown.splitlines():
        assert re.search(pattern(expected), printed), expected
