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

from quantizer.export import EXPORTERS

TEXT = (
    "It is a truth universally acknowledged, that a sentence in want of readers must be "
    "repeated. "
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a LLaMA in bfloat16 whose layers have 128 inputs, a tokenizer of bytes, and a
    text.
    """
    for package in (*EXPORTERS["compressed-tensors"].needs, "tokenizers"):
        pytest.importorskip(package, reason="needs quantizer-torch[llm]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=256, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, **sizes
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "my_llama")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: index for index, letter in enumerate(letters)}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "my_llama")
    (tmp_path / "book.txt").write_text(TEXT * 4, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
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
