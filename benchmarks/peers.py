"""Public packages that quantize a LLaMA of transformers to 4 bits, in groups of 128 weights.
Measures nothing.

Each is imported where it is used: none needs to be installed. This file runs with their
interpreters, too, so it imports neither this package nor anything that theirs need not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from workloads import Llama

GROUP = 128
LAYERS = "model.layers"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
LINEARS = (*ATTENTION, "self_attn.o_proj", *GATED, "mlp.down_proj")
SCALED = (
    ("input_layernorm", ATTENTION, "self_attn"),
    ("self_attn.v_proj", ("self_attn.o_proj",), None),
    ("post_attention_layernorm", GATED, "mlp"),
    ("mlp.up_proj", ("mlp.down_proj",), None),
)
"""Of each block: what AWQ folds factors into, the layers that read it, and the module whose
output it compares.
"""

Quantize = Callable[[Any, list[Tensor]], Any]
"""Takes a model and data, changes or replaces the model, and returns it."""


@dataclass(frozen=True)
class Peer:
    """How a package runs a job, and whether inputs of layers stay what they are; `package` is
    what pip installs.
    """

    package: str
    keeps_inputs: bool
    quantize: Quantize


def llmcompressor_gptq(model: Any, batches: list[Tensor]) -> Any:
    """Sequential, columns by size of their inputs with static groups (its default)."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    rows = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in batches]
    recipe = GPTQModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"])
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    settings = {"num_calibration_samples": len(rows), "pipeline": "sequential"}
    # No processor is looked for
    oneshot(model=model, processor=object(), dataset=loader, recipe=recipe, **settings)
    return model


def neural_compressor_gptq(model: Any, batches: list[Tensor]) -> Any:
    """Columns in the order they have: by size of their inputs with static groups is an error of
    version 3.10.
    """
    from neural_compressor.torch.quantization import GPTQConfig

    folder = model.config.name_or_path  # it wants one, and reads nothing there
    config = GPTQConfig(
        bits=4, use_sym=False, group_size=GROUP, block_size=128, model_path=folder
    )
    return _neural_compressor(model, config, batches)


def neural_compressor_awq(model: Any, batches: list[Tensor]) -> Any:
    """Factors and clipping."""
    from neural_compressor.torch.quantization import AWQConfig

    return _neural_compressor(
        model, AWQConfig(bits=4, use_sym=False, group_size=GROUP), batches
    )


@torch.no_grad()
def _neural_compressor(model: Any, config: Any, batches: list[Tensor]) -> Any:
    from neural_compressor.torch.quantization import convert, prepare

    model = prepare(model, config, example_inputs=batches[0])
    for batch in batches:
        model(batch)
    return convert(model)


def quark_rounding(name: str) -> Quantize:
    """One of its algorithms that round, of the class `name`: columns by size of their inputs,
    static groups.
    """

    def quantize(model: Any, batches: list[Tensor]) -> Any:
        from quark.torch.quantization.config import config

        algorithm = getattr(config, name)(
            inside_layer_modules=list(LINEARS), model_decoder_layers=LAYERS
        )
        return _quark(model, algorithm, batches)

    return quantize


def quark_awq(model: Any, batches: list[Tensor]) -> Any:
    """Factors and clipping."""
    from quark.torch.quantization.config.config import AWQConfig

    scaled = [
        {
            "prev_op": source,
            "layers": list(layers),
            "inp": layers[0],
            "module2inspect": inspected,
        }
        for source, layers, inspected in SCALED
    ]
    return _quark(model, AWQConfig(scaling_layers=scaled, model_decoder_layers=LAYERS), batches)


def _quark(model: Any, algorithm: Any, batches: list[Tensor]) -> Any:
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig, QLayerConfig, Uint4PerGroupSpec

    spec = Uint4PerGroupSpec(
        ch_axis=-1, group_size=GROUP, is_dynamic=False
    ).to_quantization_spec()
    config = QConfig(
        global_quant_config=QLayerConfig(weight=spec),
        exclude=["lm_head"],
        algo_config=[algorithm],
    )
    loader: DataLoader[Any] = DataLoader(torch.cat(batches), batch_size=1)  # type: ignore[arg-type]
    return ModelQuantizer(config).quantize_model(model, loader)


def autoround(model: Any, batches: list[Tensor]) -> Any:
    """Signed gradient descent on rounding and ranges, with its default of 200 steps a block."""
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    # It wants a tokenizer, and reads only the samples
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # type: ignore[no-untyped-call]
    samples = []
    for ids in torch.cat(batches):
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    loader: DataLoader[Any] = DataLoader(samples, batch_size=1)  # type: ignore[arg-type]
    rounding = AutoRound(
        model,
        tokenizer,
        bits=4,
        sym=False,
        group_size=GROUP,
        nsamples=len(samples),
        seqlen=len(samples[0]["input_ids"]),
        batch_size=4,
        dataset=loader,
    )
    rounded, _ = rounding.quantize()
    # It leaves the decoded weights in bfloat16
    return rounded.float()


def in_transformers(model: Llama, folder: str) -> Any:
    """The same function as a model of transformers; its config, which some packages look for,
    is in the folder.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, hidden = model.embed_tokens.weight.shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=len(model.get_parameter("layers.0.gate_proj.weight")),
        num_hidden_layers=len(model.layers),
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config.save_pretrained(folder)
    config.name_or_path = folder
    twin: Any = LlamaForCausalLM(config)
    twin.eval()
    twin.load_state_dict(
        {path_there(name): tensor for name, tensor in model.state_dict().items()}
    )
    return twin


def path_there(name: str) -> str:
    """A parameter's path in transformers' model."""
    if name.startswith("lm_head"):
        return name
    return "model." + re.sub(r"\b(gate|up|down)_proj", r"mlp.\1_proj", name)


LANGUAGE_PEERS = {
    "llm-compressor GPTQ": Peer("llmcompressor", True, llmcompressor_gptq),
    "neural-compressor GPTQ": Peer("neural-compressor-pt", True, neural_compressor_gptq),
    "quark GPTQ": Peer("amd-quark", True, quark_rounding("GPTQConfig")),
    "quark GPTAQ": Peer("amd-quark", True, quark_rounding("GPTAQConfig")),
    "quark Qronos": Peer("amd-quark", True, quark_rounding("QronosConfig")),
    "AutoRound": Peer("auto-round", True, autoround),
    "neural-compressor AWQ": Peer("neural-compressor-pt", False, neural_compressor_awq),
    "quark AWQ": Peer("amd-quark", False, quark_awq),
}
