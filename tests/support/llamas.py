"""A LLaMA of one block without training, small enough to be quantized and loaded in a
moment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantizer.export.targets import EXPORTERS

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
_TEXT_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SENTENCE = (
    "It is a truth universally acknowledged, that a sentence in want of readers must be "
    "repeated. "
)


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


def text_llama(folder: Path, inputs: int = 128, **settings: Any) -> None:
    """Write a LLaMA in bfloat16 whose layers have so many inputs, with a tokenizer of bytes, to
    `my_llama`, and a text to `book.txt`; `settings` are more fields of its config.
    """
    for package in (*EXPORTERS["compressed-tensors"].needs, "tokenizers"):
        pytest.importorskip(package, reason="needs quantizer-torch[llm]")
    sizes = {"hidden_size": inputs, "intermediate_size": inputs, "num_key_value_heads": 4}
    sizes |= settings
    model = llama(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes).bfloat16()
    saved(folder / "my_llama", model)
    byte_tokenizer().save_pretrained(folder / "my_llama")
    (folder / "book.txt").write_text(SENTENCE * 8, encoding="utf-8")


def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text_mixture(folder: Path) -> None:
    """Write a mixture of four experts with the same tokenizer to `my_mixture`, and the
    text.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = _TEXT_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).bfloat16()
    saved(folder / "my_mixture", model)
    byte_tokenizer().save_pretrained(folder / "my_mixture")
    (folder / "book.txt").write_text(SENTENCE * 8, encoding="utf-8")


def text_llava(folder: Path) -> None:
    """Write a model that reads images with text, and its processor, to `my_llava`, and
    the text.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("PIL", reason="the processor of images needs it (extra: images)")
    torch.manual_seed(0)
    eyes = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    # The tokenizer has 256 bytes, and the place of an image as one more token
    text = transformers.LlamaConfig(**_TEXT_SIZES | {"vocab_size": 264})
    settings = transformers.LlavaConfig(
        vision_config=eyes,
        text_config=text,
        image_token_index=256,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model = transformers.LlavaForConditionalGeneration(settings).bfloat16()
    saved(folder / "my_llava", model)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": 28, "width": 28}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)
    processor = transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    processor.save_pretrained(folder / "my_llava")
    (folder / "book.txt").write_text(SENTENCE * 8, encoding="utf-8")
