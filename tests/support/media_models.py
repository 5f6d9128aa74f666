"""Small random models that read images or sounds, with a call of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

IMAGE_TOKEN = 256
"""The token in whose place a value of an image goes."""
TEXT = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
Built = tuple[Any, dict[str, Tensor]]


def built(kind: str, **settings: Any) -> Any:
    """The model of a class of transformers, drawn from one seed, with a config of the class that
    belongs to it.
    """
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**settings)).eval()


def ids_with(places: int, vocabulary: int = 200) -> Tensor:
    """Twelve token ids [1, 12] with the places of an image after the second."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocabulary, (1, 12), generator=generator)
    ids[0, 2 : 2 + places] = IMAGE_TOKEN
    return ids


def image(*shape: int) -> Tensor:
    """Normally distributed values of an image or a sound."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def llava() -> Built:
    """A model with four places for the patches of an image."""
    model = built(
        "LlavaForConditionalGeneration",
        vision_config=EYES | {"model_type": "clip_vision_model"},
        text_config=TEXT | {"model_type": "llama"},
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return model, {"input_ids": ids_with(4), "pixel_values": image(1, 3, 28, 28)}


def qwen2_vl() -> Built:
    """A model whose images are cut into patches, and which cannot be traced."""
    eyes = {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
    }
    rotation = {"type": "mrope", "mrope_section": [4, 6, 6]}
    model = built(
        "Qwen2VLForConditionalGeneration",
        vision_config=eyes,
        text_config=TEXT | {"rope_scaling": rotation},
        image_token_id=IMAGE_TOKEN,
        video_token_id=257,
        vision_start_token_id=258,
        vision_end_token_id=259,
    )
    ids = ids_with(4)
    call = {
        "input_ids": ids,
        "pixel_values": image(16, 2 * 3 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }
    return model, call


def idefics3() -> Built:
    """A model with a connector that puts four patches into one place."""
    model = built(
        "Idefics3ForConditionalGeneration",
        vision_config=EYES,
        text_config=TEXT | {"model_type": "llama"},
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=1,
    )
    return model, {"input_ids": ids_with(1), "pixel_values": image(1, 1, 3, 28, 28)}


def mllama() -> Built:
    """A model whose second layer lets tokens attend to an image."""
    eyes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "attention_heads": 2,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "image_size": 28,
        "patch_size": 14,
        "max_num_tiles": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    model = built(
        "MllamaForConditionalGeneration",
        vision_config=eyes,
        text_config=TEXT | {"num_hidden_layers": 2, "cross_attention_layers": [1]},
        image_token_index=IMAGE_TOKEN,
    )
    ids = ids_with(1)
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": image(1, 1, 1, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.int64),
        "cross_attention_mask": torch.ones(1, 12, 1, 1, dtype=torch.int64),
    }
    return model, call


def blip2() -> Built:
    """A model with learned queries to an image."""
    queries = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "encoder_hidden_size": 32,
        "cross_attention_frequency": 1,
        "vocab_size": 20,
    }
    text = TEXT | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64}
    model = built(
        "Blip2ForConditionalGeneration",
        vision_config=EYES,
        qformer_config=queries,
        text_config=text,
        num_query_tokens=4,
        image_token_index=IMAGE_TOKEN,
    )
    return model, {"input_ids": ids_with(4), "pixel_values": image(1, 3, 28, 28)}


def qwen2_audio() -> Built:
    """A model that reads sounds."""
    ears = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 16,
        "max_source_positions": 8,
    }
    model = built(
        "Qwen2AudioForConditionalGeneration",
        audio_config=ears,
        text_config=TEXT | {"model_type": "qwen2"},
        audio_token_index=IMAGE_TOKEN,
    )
    ids = ids_with(4)
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": image(1, 16, 16),
        "feature_attention_mask": torch.ones(1, 16, dtype=torch.int64),
    }
    return model, call


def clip() -> Built:
    """A model that compares images with texts, and writes none."""
    text = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 20,
        "eos_token_id": 2,
    }
    model = built("CLIPModel", vision_config=EYES, text_config=text, projection_dim=32)
    return model, {"input_ids": ids_with(0), "pixel_values": image(1, 3, 28, 28)}


def whisper() -> Built:
    """A model that writes what it hears."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_attention_heads": 2, f"{part}_ffn_dim": 48}
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    model = built(
        "WhisperForConditionalGeneration",
        vocab_size=64,
        num_mel_bins=16,
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=2,
        **sizes,
        **tokens,
    )
    call = {"input_features": image(1, 16, 16), "decoder_input_ids": ids_with(0, 60)}
    return model, call


MEDIA_MODELS: Mapping[str, Callable[[], Built]] = {
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "idefics3": idefics3,
    "mllama": mllama,
    "blip2": blip2,
    "qwen2_audio": qwen2_audio,
}
"""The language models with additions for images or sounds."""
