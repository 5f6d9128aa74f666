"""docs/walkthrough.md: from five mistakes to a gate, in at most twelve commands, run as they
are written.
"""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.llamas import llama, saved
from support.pages import commands_of

from quantizer.cli.main import run_command

ROOT = Path(__file__).parents[2]
PARTS = (ROOT / "docs" / "walkthrough.md").read_text("utf-8").split("\n## ")
MODEL = re.findall(
    r"```python\n(# my_model\.py.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
)[0]
Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.real


def commands(part: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    return [line for language, block in blocks if not language for line in commands_of(block)]


def walked(part: str, capsys: Capture) -> dict[str, tuple[int, str]]:
    """The commands after the installation, with their exit codes and what they print."""
    install, *rest = commands(part)
    assert re.match(r"pip install (?:-c constraints\.txt )?'(\.|quantizer-torch)\[", install)
    assert len(rest) < 12
    Path("quantize_config.json").write_text(
        re.findall(r"```json\n(.*?)```", part, re.DOTALL)[0]
    )
    found = {}
    for command in rest:
        program, *words = shlex.split(command)
        assert program == "quantizer"
        code = run_command(words)
        said = capsys.readouterr()
        found[command] = code, said.out + said.err
    return found


class First(HTMLParser):
    """The first link of the table of layers."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.href = ""
        self.feed(content[content.index('id="layers"') :])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and not self.href:
            self.href = dict(attrs)["href"] or ""


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_from_five_mistakes_to_a_gate(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    part = PARTS[0] if kind == "a file" else PARTS[1]
    if kind == "a file":
        Path("my_model.py").write_text(MODEL)
    else:
        saved(Path("my_llama"), llama())
        characters(Path("my_llama") / "tokenizer.json")
        Path("book.txt").write_text("abcdefgh ijkl mnop. " * 40)
    found = list(walked(part, capsys).items())
    (_, (wrong, listed)), (_, (fixed, _)), *rest = found
    assert wrong == 1 and "5 errors" in listed
    assert fixed == 0
    assert [(command, code) for command, (code, _) in rest if code] == []
    page = Path("quantize_result", "report.html").read_text()
    worst = json.loads(Path("quantize_result", "report.json").read_text())["layers"][0]
    assert First(page).href == f"#line-{worst['line']}"
    assert 'id="sensitivity"' in page
    tested = json.loads(Path("patched", "report.json").read_text())["metrics"]["sqnr_db"]
    before = json.loads(Path("quantize_result", "report.json").read_text())["metrics"][
        "sqnr_db"
    ]
    (bound,) = {float(text) for text in re.findall(r"sqnr_db>=(\d+)", part)}
    assert before < bound <= tested


def characters(path: Path) -> None:
    """A tokenizer of single characters."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs quantizer-torch[llm]")
    vocabulary = {character: at for at, character in enumerate("?abcdefghijklmnopqrstuvwxyz .")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(path))
