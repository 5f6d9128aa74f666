"""Small mixtures of experts of transformers, whose experts are one tensor for each of their
layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_ALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "use_cache": False,
}
_RANKS = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_RANKS,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 16},
}
"""Those of DeepSeek have shared experts beside the others, those of gpt-oss matrices [experts,
in, out] and biases.
"""
EXPERTS = 4
IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def mixture(family: str, implementation: str = "grouped_mm", **changes: Any) -> Any:
    """A model with random weights; needs transformers."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_ALL | FAMILIES[family] | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_experts_implementation(implementation)
    return model.requires_grad_(False)


def calls(count: int = 4) -> list[Tensor]:
    """Batches of tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (2, 16), generator=generator) for _ in range(count)]


def experts(model: nn.Module, layer: int = 1) -> Any:
    """The module of the experts of a layer."""
    return model.get_submodule(f"model.layers.{layer}.mlp.experts")


def matrices(module: Any, name: str) -> Tensor:
    """A tensor of the experts as [experts, out, in]."""
    found: Tensor = getattr(module, name).detach()
    return found.mT if module.is_transposed else found
