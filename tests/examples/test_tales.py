"""The language model of `quantizer demo --llm` has learned its grammar, runs in llama.cpp, and its
text is what the grammar tells.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.runs import ROOT
from support.tales import encoded, grammar

from quantizer.cli.main import run_command

PROMPT = "Once there was a little bear called Mira, who lived by the sea. One day"


@pytest.fixture
def demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[list[str]]:
    """The demo, as the current folder, and the commands that it says to try."""
    monkeypatch.chdir(tmp_path)
    assert run_command(["demo", "--llm", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[1:] for line in lines if line.startswith("  quantizer ")]


def test_the_text_is_what_the_grammar_tells() -> None:
    names = grammar()
    text, nats = names["tales"](names["HELD_OUT_TALES"], names["HELD_OUT_SEED"])
    assert (ROOT / "examples" / "tales.txt").read_text("utf-8") == text
    least = math.exp(nats / len(encoded(text)))
    assert least == pytest.approx(1.858, abs=0.001)


@pytest.mark.real
def test_the_commands_of_the_demo_lose_nothing(
    demo: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [words[3:5] for words in demo] == [["tales.txt", "--to"]] * 2
    for words in demo:
        gates = ["--gate", "perplexity<=2.15", "--gate", "perplexity_ratio<=1.005"]
        assert run_command([*words, *gates]) == 0, capsys.readouterr()
    assert Path("quantize_result/export/LlamaForCausalLM-compressed-tensors").is_dir()


@pytest.mark.real
def test_llama_cpp_tells_the_tale_of_transformers(demo: list[list[str]]) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp")
    from support.llama_cpp import served

    transformers = pytest.importorskip("transformers")
    assert run_command(["run", "tales", "--to", "gguf"]) == 0
    server = served(Path("quantize_result/export/LlamaForCausalLM.gguf"), length=128)
    question = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    answer = server.handle_completions(question)["choices"][0]["text"]
    model = transformers.AutoModelForCausalLM.from_pretrained("tales", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained("tales")
    tokens = tokenizer(PROMPT, return_tensors="pt")
    told = model.generate(**tokens, max_new_tokens=40, do_sample=False)[0]
    assert PROMPT + answer == tokenizer.decode(told)
