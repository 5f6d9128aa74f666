"""A .gguf of a tiny LLaMA with a vocabulary, written by the package gguf alone, as converters
of llama.cpp do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def template(path: Path, model: Any, kind: str = "Q8_0") -> Path:
    """The model's weights in blocks of a type, with a key and a tensor that the model lacks,
    and a vocabulary.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("custom.list", [1, 2, 3])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        add(writer, config, name, tensor.float().numpy(), kind)
    writer.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Of sentencepiece's kind: three special tokens, then pieces of two letters."""
    letters = [chr(ord("a") + index) for index in range(26)]
    pieces = [*letters, *(first + second for first in letters for second in letters)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *pieces[: size - 3]])
    writer.add_token_scores([-float(index) for index in range(size)])
    writer.add_token_types([2, 3, 3, *[1] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def add(writer: gguf.GGUFWriter, config: Any, name: str, value: Any, kind: str) -> None:
    """A tensor under its name in llama.cpp, the rows of q and k interleaved; vectors stay
    float32.
    """
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return
    if name not in NAMES:
        _, _, number, layer = name.removesuffix(".weight").split(".", 3)
        heads = {
            "q_proj": config.num_attention_heads,
            "k_proj": config.num_key_value_heads,
        }.get(layer[10:], 0)
        if heads:
            value = (
                value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            )
    target = NAMES[name] if name in NAMES else f"blk.{number}.{BLOCK[layer]}.weight"
    if value.ndim == 1:
        writer.add_tensor(target, value)
        return
    number_of = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(target, gguf.quantize(value, number_of), raw_dtype=number_of)
