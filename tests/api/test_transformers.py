"""Models of transformers in their own classes: `.generate()` works, GPT-2's Conv1D is
quantized, dtypes stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from api.specs import per_token, quantized, same, spec

transformers = pytest.importorskip("transformers")

from quantizer import ModelQuantizer

SMALL = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "OPT": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 64,
    },
    "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4},
}
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def built(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    config = getattr(transformers, f"{family}Config")(**SMALL, **CONFIGS[family])
    return getattr(transformers, head)(config).to(dtype).eval()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [(torch.float32, per_token()), (torch.bfloat16, spec()), (torch.bfloat16, per_token())],
    ids=["float32 dynamic", "bfloat16 static", "bfloat16 dynamic"],
)
def test_a_language_model_still_generates_and_comes_back(
    family: str, dtype: torch.dtype, inputs: Any, tmp_path: Path
) -> None:
    model = built(family, dtype)
    expected = model(IDS).logits.float()
    quantized(model, torch.utils.data.DataLoader(IDS), weight=spec(), input_tensors=inputs)
    found = model(IDS).logits
    assert found.dtype == dtype
    assert (
        10 * torch.log10(expected.square().sum() / (expected - found.float()).square().sum())
        > 30
    )
    assert model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=1).shape[0] == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ModelQuantizer.save(model, tmp_path)
    assert same(ModelQuantizer.load(built(family, dtype), tmp_path)(IDS).logits, found)
