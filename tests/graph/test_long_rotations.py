"""Rotations that switch their frequencies at a length are traced with both sides of the
switch.
"""

from __future__ import annotations

import pytest
import torch
from support.llamas import SIZES

from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network

transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
SWITCH = 12


@pytest.mark.parametrize("length", [8, 16], ids=["traced below", "traced above"])
def test_texts_on_both_sides_of_the_switch_have_their_frequencies(length: int) -> None:
    torch.manual_seed(0)
    ropes = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": SWITCH,
        "rope_theta": 10000.0,
    }
    config = transformers.Phi3Config(**SIZES, rope_parameters=ropes, pad_token_id=0)
    model = transformers.Phi3ForCausalLM(config).eval()
    model.config.use_cache = False
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    graph = trace(model, (), {"input_ids": ids[:, :length]})
    network = Network(graph)
    for count in (8, SWITCH, SWITCH + 1, 24):
        with torch.no_grad():
            expected = model(input_ids=ids[:, :count]).logits
        actual = network(input_ids=ids[:, :count])
        logits = actual[0] if isinstance(actual, tuple) else actual["logits"]
        assert torch.allclose(logits, expected, atol=1e-5), count
    assert "forward" not in vars(model.model.rotary_emb)
    # It can be traced again after calls that have kept the frequencies
    assert trace(model, (), {"input_ids": ids}).nodes
