"""What a written folder keeps of the folder that a model came from, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import llama, saved

from quantizer.export.hugging_face_folder import write_folder

transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer() -> Any:
    """A tokenizer of bytes, with a template for chats."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<image>"])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    made.chat_template = TEMPLATE
    return made


def llama_like(folder: Path) -> None:
    tokenizer().save_pretrained(folder)


def whisper_like(folder: Path) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    words = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    words.save_pretrained(folder)
    (folder / "normalizer.json").write_text('{"colour": "color"}')
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    sounds = transformers.WhisperFeatureExtractor(feature_size=8)
    transformers.WhisperProcessor(sounds, words).save_pretrained(folder)


def llava_like(folder: Path) -> None:
    pytest.importorskip("PIL")
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8)
    processor = transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=2,
        chat_template=TEMPLATE,
        vision_feature_select_strategy="default",
    )
    processor.save_pretrained(folder)


@pytest.mark.parametrize("add", [llama_like, whisper_like, llava_like])
def test_tokenizers_processors_and_settings_are_those_of_the_source(
    add: Any, tmp_path: Path
) -> None:
    source = saved(tmp_path / "source", llama())
    add(source)
    settings = transformers.GenerationConfig(
        temperature=0.3, do_sample=True, eos_token_id=[3, 4]
    )
    settings.save_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    (tmp_path / "result").mkdir()
    tensors = {"model.norm.weight": torch.ones(4)}
    assert write_folder(tmp_path / "result", model, tensors, {"quant_method": "none"}) == []
    for name in ("source", "result"):
        assert (tmp_path / name / "config.json").is_file()
    loaded = []
    for name in ("source", "result"):
        folder = tmp_path / name
        words = transformers.AutoTokenizer.from_pretrained(folder)
        parts = [words("a text").input_ids, words.get_vocab(), words.chat_template]
        parts.append(transformers.GenerationConfig.from_pretrained(folder).to_dict())
        processor = transformers.AutoProcessor.from_pretrained(folder)
        parts.append(type(processor).__name__)
        if hasattr(processor, "to_dict"):
            parts.append(processor.to_dict())
        loaded.append(parts)
    assert loaded[0] == loaded[1]
    assert loaded[0][3]["temperature"] == 0.3


def test_what_stays_behind_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", llama())
    (source / "onnx").mkdir()
    for name in ("modeling.py", "pytorch_model.bin", "old.index.json", "LICENSE", ".hidden"):
        (source / name).write_text("")
    (source / "video_preprocessor_config.json").write_text("{}")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    result = tmp_path / "result"
    result.mkdir()
    [remark] = write_folder(result, model, {"weight": torch.ones(4)}, {})
    assert remark == "not copied from source: modeling.py, onnx/"
    assert sorted(path.name for path in result.iterdir()) == [
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "video_preprocessor_config.json",
    ]
