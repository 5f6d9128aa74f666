"""`kind:more_bits` stands for the layers that llama.cpp's mixtures Q4_K_M and Q5_K_M write in a
wider type.
"""

from __future__ import annotations

import pytest
from torch import nn

from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.config.resources import load_resource
from quantizer.graph.modules import module_graph
from quantizer.plan.resolve import resolve_plan

# By the rule of llama.cpp: the first and the last eighth of the blocks, and every third between
WIDE_BLOCKS = {
    1: [0],
    2: [1],
    28: [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27],
    32: [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "v_proj", "down_proj"):
            setattr(self, name, nn.Linear(256, 256, bias=False))


class Decoder(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 256)
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.lm_head = nn.Linear(256, 8, bias=False)


@pytest.mark.parametrize("count", WIDE_BLOCKS)
@pytest.mark.parametrize("bits", [4, 5])
def test_blocks_with_more_bits_are_those_of_llama_cpp(count: int, bits: int) -> None:
    document = load_resource("configs", f"gguf_q{bits}_k_m.json")
    config = check_document(Document.of(document, "config")).require()
    graph = module_graph(Decoder(count))
    plan = resolve_plan(config, graph, graph)
    dtypes = {
        graph.by_name[layer].scope: tensor.spec.dtype
        for (layer, _), tensor in plan.tensors.items()
    }
    expected = {"embed_tokens": "q6_k", "lm_head": "q6_k"}
    for index in range(count):
        wide = "q6_k" if index in WIDE_BLOCKS[count] else f"q{bits}_k"
        block = f"layers.{index}"
        expected[f"{block}.q_proj"] = f"q{bits}_k"
        expected[f"{block}.v_proj"] = wide
        expected[f"{block}.down_proj"] = wide
    assert dtypes == expected
