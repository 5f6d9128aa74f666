"""Small models of 24 families of transformers, with weights drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
_PLAIN = {"vocab_size": VOCABULARY, "hidden_size": 64, **_HEADS, **_IDS}
_USUAL = {**_PLAIN, "intermediate_size": 128, "max_position_embeddings": 64}
_SHARED_KEYS = {**_USUAL, "num_key_value_heads": 1}
_WITH_HEAD_SIZE = {**_SHARED_KEYS, "head_dim": 32}
# Attention is scaled by the size of heads, as in the released models
_GEMMA = {**_WITH_HEAD_SIZE, "query_pre_attn_scalar": 32}
_GRANITE = {
    "attention_multiplier": 1 / 32,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_EXPERTS = {**_WITH_HEAD_SIZE, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {
    **_EXPERTS,
    "num_experts": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_LATENT = {
    **_USUAL,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_STATES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "head_dim": 32,
    "num_heads": 4,
    "n_groups": 1,
    **_IDS,
}
_OLDER_NAMES = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    **_IDS,
}
_ENCODER_AND_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 32,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    **_IDS,
}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        title: what tables call it.
        stem: of the names of its classes in transformers, as `Llama` of `LlamaConfig`.
        sizes: of the small model.
        head: the end of the name of the class that has a head.
        settings: the stem of its config's name, if that is another.
        reads_pairs: whether a call needs the tokens of a decoder, too.
    """

    title: str
    stem: str
    sizes: Mapping[str, Any]
    head: str = "ForCausalLM"
    settings: str = ""
    reads_pairs: bool = False

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the model in evaluation mode; needs transformers."""
        import transformers

        torch.manual_seed(0)
        settings = getattr(transformers, f"{self.settings or self.stem}Config")(**self.sizes)
        model = getattr(transformers, self.stem + self.head)(settings).eval()
        spread_weights(model)
        # Buffers of rotary embeddings stay float32, as in models that are loaded
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
        return model.requires_grad_(False)

    def batches(self, count: int = 2, length: int = 16) -> list[dict[str, Tensor]]:
        """Return calls with two sequences of tokens each, without special tokens."""
        generator = torch.Generator().manual_seed(1)
        calls: list[dict[str, Tensor]] = []
        for _ in range(count):
            ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
            call = {"input_ids": ids}
            if self.reads_pairs:
                call["decoder_input_ids"] = ids.flip(1)
            calls.append(call)
        return calls


FAMILIES = {
    "llama": Family("LLaMA", "Llama", _WITH_HEAD_SIZE),
    "mistral": Family("Mistral", "Mistral", {**_WITH_HEAD_SIZE, "sliding_window": None}),
    "qwen2": Family("Qwen2", "Qwen2", _SHARED_KEYS),
    "qwen3": Family("Qwen3", "Qwen3", {**_SHARED_KEYS, "head_dim": 128}),
    "phi": Family("Phi", "Phi", _USUAL),
    "phi3": Family("Phi-3", "Phi3", _SHARED_KEYS),
    "gemma2": Family("Gemma 2", "Gemma2", _GEMMA),
    "gemma3": Family(
        "Gemma 3", "Gemma3", {**_GEMMA, "sliding_window": 8}, settings="Gemma3Text"
    ),
    "gpt2": Family("GPT-2", "GPT2", _OLDER_NAMES, head="LMHeadModel"),
    "gpt_neox": Family("GPT-NeoX", "GPTNeoX", _USUAL),
    "opt": Family("OPT", "OPT", {**_USUAL, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": Family("BLOOM", "Bloom", {**_PLAIN, "n_layer": 2, "n_head": 2}),
    "falcon": Family("Falcon", "Falcon", _PLAIN),
    "starcoder2": Family("StarCoder2", "Starcoder2", _SHARED_KEYS),
    "stablelm": Family("StableLM", "StableLm", _SHARED_KEYS),
    "cohere": Family("Cohere", "Cohere", _SHARED_KEYS),
    "olmo2": Family("OLMo 2", "Olmo2", _SHARED_KEYS),
    "granite": Family("Granite", "Granite", {**_SHARED_KEYS, **_GRANITE}),
    "mixtral": Family("Mixtral", "Mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": Family("Qwen3 MoE", "Qwen3Moe", _SMALL_EXPERTS),
    "granite_moe": Family(
        "Granite MoE", "GraniteMoe", {**_EXPERTS, "num_local_experts": 4, **_GRANITE}
    ),
    "deepseek_v3": Family("DeepSeek-V3", "DeepseekV3", {**_LATENT, **_ROUTED}),
    "mamba2": Family(
        "Mamba-2", "Mamba2", {**_STATES, "head_dim": 32, "num_heads": 4, "n_groups": 1}
    ),
    "t5": Family(
        "T5", "T5", _ENCODER_AND_DECODER, head="ForConditionalGeneration", reads_pairs=True
    ),
}
"""In the order of tables."""


def spread_weights(model: nn.Module) -> None:
    """Draw matrices whose rows have different ranges and whose values have tails, as in trained
    models; all others are moved a little.
    """
    generator = torch.Generator().manual_seed(2)
    tables = {id(module.weight) for module in model.modules() if _is_table(module)}
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim < 2:
                value.add_(noise, alpha=0.05)
            elif id(value) in tables:
                value.copy_(noise)
            else:
                rows = torch.randn((*value.shape[:-1], 1), generator=generator)
                tails = 1 + 0.2 * noise.square()
                value.copy_(noise * tails * (0.3 * rows).exp() / math.sqrt(value.shape[-1]))


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
