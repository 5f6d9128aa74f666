"""A LLaMA of one block without training, small enough to be quantized and loaded in a
moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(**settings: Any) -> Any:
    """The model, drawn from one seed; `settings` are more fields of its config."""
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | settings)).eval()


def saved(folder: Path, model: Any, **settings: Any) -> Path:
    """The folder that the model is saved in."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **settings)
    return folder


def tokens(count: int = 2) -> list[dict[str, Tensor]]:
    """Batches of two samples of eight tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(0, VOCABULARY, (2, 8), generator=generator)}
        for _ in range(count)
    ]
