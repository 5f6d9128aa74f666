"""docs/language_models.md: from a Hugging Face folder to generated text in five commands, run
as they are written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.documented import Commands
from support.llamas import text_llama


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a LLaMA that has a tokenizer, and a text."""
    text_llama(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_five_commands_generate_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Commands.under("language_models.md", "## A checkpoint that engines load")
    assert commands.extra == "quantizer-torch[llm]"
    commands.quantize()
    assert (
        "deployed: quantize_result/export/LlamaForCausalLM-compressed-tensors"
        in capsys.readouterr().out
    )
    commands.end()
    assert "It is a truth" in capsys.readouterr().out
    assert "compressed_tensors" in sys.modules
