"""llama.cpp itself, through its CPU binding xllamacpp, on files that are written by a
template.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.extended import extended
from support.llamas import VOCABULARY, llama, tokens
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.export.targets import EXPORTERS

for package in EXPORTERS["gguf"].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
pytest.importorskip("xllamacpp", reason="needs xllamacpp, the CPU binding of llama.cpp")
import transformers
from support.gguf_templates import template
from support.llama_cpp import next_probabilities, served

IDS = [1, 5, 9, 13, 17, 21, 33, 40]


def log_probabilities(path: Path) -> Tensor:
    """Those of the token that follows, as llama.cpp finds them."""
    return next_probabilities(served(path), IDS, VOCABULARY)[0]


def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    """The input of a product as ggml has it: int8 in blocks of 32, with scales in half
    precision (Q8_0).
    """
    blocks = args[0].reshape(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, torch.round(blocks * (1 / scale)), 0.0)
    return ((codes * scale.half().float()).view(args[0].shape),)


def rounded_by_super_block(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    """The same for products with super-blocks: int8 in blocks of 256, with scales in float32
    (Q8_K).
    """
    blocks = args[0].reshape(-1, 256)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    inverse = torch.where(largest != 0, -127 / largest, 0.0)
    codes = torch.round(blocks * inverse).clamp(max=127)
    scale = torch.where(inverse != 0, 1 / inverse, 0.0)
    return ((codes * scale).view(args[0].shape),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_k_m", *extended("q4_k", "q5_k", "q6_k", "iq4_nl")])
def test_llama_cpp_computes_super_blocks_but_for_inputs_in_int8(
    name: str, tmp_path: Path
) -> None:
    """Embedding and head are Q6_K, and Q8_0 with iq4_nl."""
    model = llama(tie_word_embeddings=True, hidden_size=256, intermediate_size=256)
    base = template(tmp_path / "base.gguf", model)
    result = quantizer.calibrate(model, ROOT / "configs" / f"gguf_{name}.json", tokens())
    result.export("gguf", tmp_path / "net.gguf", gguf_template=base)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="net.gguf", dtype=torch.float32
    )
    hook = rounded if name == "iq4_nl" else rounded_by_super_block
    for module in loaded.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(hook)
    with torch.no_grad():
        expected = torch.log_softmax(loaded(input_ids=torch.tensor([IDS])).logits[0, -1], -1)
    difference = float((log_probabilities(tmp_path / "net.gguf") - expected).abs().max())
    assert difference < 5e-6, difference


@pytest.mark.slow
@pytest.mark.shows("LLaMA (random), Q8_0 to Q5_1", "llama.cpp")
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", *extended("q5_0", "q5_1")])
def test_llama_cpp_computes_test_mode_but_for_inputs_in_int8(name: str, tmp_path: Path) -> None:
    """Types with a minimum also round the sum of a block's inputs, which is not modelled
    here.
    """
    model = llama(tie_word_embeddings=True)
    base = template(tmp_path / "base.gguf", model)
    result = quantizer.calibrate(model, ROOT / "configs" / f"gguf_{name}.json", tokens())
    result.export("gguf", tmp_path / "net.gguf", gguf_template=base)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="net.gguf", dtype=torch.float32
    )
    for module in loaded.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounded)
    with torch.no_grad():
        expected = torch.log_softmax(loaded(input_ids=torch.tensor([IDS])).logits[0, -1], -1)
    difference = float((log_probabilities(tmp_path / "net.gguf") - expected).abs().max())
    assert difference < (5e-6 if name.endswith("_0") else 5e-3)
