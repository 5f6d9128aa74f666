"""A LLaMA of transformers that is small enough to be run in any engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from workloads import draw_like_trained, tokens

VOCABULARY = 640


def transformers_llama(seed: int = 0) -> Any:
    """Seeded, in eval mode, and drawn like a trained model: 2.1 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    draw_like_trained(model, model.model.embed_tokens, seed)
    return model


def prompts(count: int = 4, batch: int = 4, length: int = 32) -> list[dict[str, Tensor]]:
    """Batches of prompts, of which a token occurs as often as words do."""
    batches: list[dict[str, Tensor]] = []
    for first in range(0, count, batch):
        sequences = tokens(batch, length, VOCABULARY, seed=2 + first)
        batches.append({"input_ids": torch.cat(sequences)})
    return batches
