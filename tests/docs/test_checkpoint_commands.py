"""docs/language_models.md and docs/one_command.md: from a Hugging Face folder to generated text
in five commands and in two, run as they are written.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from support.documented import Commands
from support.llamas import text_llama


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a LLaMA that has a tokenizer, and a text."""
    text_llama(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_five_commands_generate_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Commands.under("language_models.md", "## A checkpoint that engines load")
    assert commands.extra in (".[llm]", "quantizer-torch[llm]")
    commands.quantize()
    assert (
        "deployed: quantize_result/export/LlamaForCausalLM-compressed-tensors"
        in capsys.readouterr().out
    )
    commands.end()
    assert "It is a truth" in capsys.readouterr().out
    assert "compressed_tensors" in sys.modules


def test_two_commands_generate_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "my_llama").rename(folder / "path" / "to" / "huggingface_folder")
    (folder / "book.txt").rename(folder / "texts.txt")
    commands = Commands.under("one_command.md", "## From a Hugging Face folder to text")
    assert len(commands.quantizing) == 1
    commands.quantize()
    verdict = capsys.readouterr().out
    assert "export/LlamaForCausalLM-compressed-tensors: int4 weights" in verdict
    commands.end()
    [answer] = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert answer["generated_text"].startswith("It is a truth")
    assert len(answer["generated_text"]) > len("It is a truth")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = folder / "quantize_result" / "export" / "LlamaForCausalLM-compressed-tensors"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.model.layers[0].mlp.up_proj.weight_packed.dtype == torch.int32
    prompt = AutoTokenizer.from_pretrained(checkpoint)("It is", return_tensors="pt")
    ids = model.generate(prompt["input_ids"], max_new_tokens=4, do_sample=False)
    assert ids.shape[1] > prompt["input_ids"].shape[1]
