"""What a written folder keeps of the folder that a model came from, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.llamas import llama, saved, tokens
from support.runs import ROOT

import quantizer
from quantizer.config.document.document import Text
from quantizer.config.load import load_text
from quantizer.errors import ModelError
from quantizer.export.compressed_tensors.placement import place_codes
from quantizer.export.hugging_face_folder import write_folder
from quantizer.graph.tracing.trace import trace
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.models import load_model

transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
tokenizers = pytest.importorskip("tokenizers")

INT8 = json.loads((ROOT / "configs" / "weight_int8.json").read_text())["global_quant_config"][
    "weight"
]
EVERY_LINEAR = {
    "layer_type_quant_config": {"Linear": {"weight": INT8}},
    "global_quant_config": {"target_device": "CPU"},
}
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


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {
        "idx": 1,
        "name": "1",
        "path": "1_Pooling",
        "type": "sentence_transformers.models.Pooling",
    },
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]


def with_modules(folder: Path, modules: Any = MODULES, **pooling: Any) -> Path:
    """The folder as one of Sentence Transformers, with a layer after the pooling."""
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(pooling))
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "2_Dense" / "model.safetensors")
    (folder / "2_Dense" / "code.py").write_text("")
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_what_modules_json_names_is_copied_with_its_weights(tmp_path: Path) -> None:
    modules = [MODULES[0] | {"path": "."}, *MODULES[1:]]
    source = with_modules(saved(tmp_path / "source", llama()), modules)
    (source / "onnx").mkdir()
    model = load_model(str(source)).module
    result = tmp_path / "result"
    result.mkdir()
    assert write_folder(result, model, {}, {}) == ["not copied from source: onnx/"]
    assert not (result / "2_Dense" / "2_Dense").exists()
    assert not load_file(result / "model.safetensors")
    for name in ("1_Pooling", "2_Dense"):
        copied = sorted(path.name for path in (result / name).iterdir())
        expected = sorted(path.name for path in (source / name).iterdir())
        assert copied == [path for path in expected if path != "code.py"]


@pytest.mark.parametrize("path", ["../secret", "/etc"])
def test_modules_are_in_the_folder(path: str, tmp_path: Path) -> None:
    source = with_modules(saved(tmp_path / "source", llama()), [MODULES[0] | {"path": path}])
    with pytest.raises(ModelError, match=r"modules\.json names a file outside its folder"):
        load_model(str(source))
    (source / "modules.json").write_text("[3]")
    with pytest.raises(ModelError, match=r"modules\.json is damaged"):
        load_model(str(source))


def test_what_the_class_does_not_use_is_carried_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a layer that the class passes over, and of one that it does not know."""
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*"]
    )
    source = saved(tmp_path / "source", llama(tie_word_embeddings=False))
    tensors = load_file(source / "model.safetensors")
    further = {
        "mtp.layers.0.fc.weight": torch.rand(64, 64),
        "model.layers.1.mlp.up_proj.weight": torch.rand(96, 64),
    }
    rotations = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tensors, **further, **rotations}, source / "model.safetensors")
    model = load_model(str(source)).module
    assert "does not use 2 tensors of" in caplog.text
    config = ROOT / "configs" / "weight_int8.json"
    result = quantizer.calibrate(model, config, tokens())
    result.export("compressed-tensors", tmp_path / "result")
    stored = load_file(tmp_path / "result" / "model.safetensors")
    for name, value in further.items():
        assert torch.equal(stored[name], value)
    assert not rotations.keys() & stored.keys()
    ignored = json.loads((tmp_path / "result" / "config.json").read_text())
    assert ignored["quantization_config"]["ignore"] == [
        "lm_head",
        "model.layers.1.mlp.up_proj",
        "mtp.layers.0.fc",
    ]
    assert load_model(str(tmp_path / "result")).name == "LlamaForCausalLM"


@pytest.mark.slow
def test_poolers_and_classifiers_stay_float(tmp_path: Path) -> None:
    """Also where a classifier has as many classes as there are types of tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    more = {"vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 32}
    config = transformers.BertConfig(**sizes, **more)
    model = transformers.BertForSequenceClassification(config).eval()
    quantizer.quantize(model, tokens(), to="w8", folder=tmp_path / "out")
    [config_file] = (tmp_path / "out").glob("export/*/config.json")
    content = json.loads(config_file.read_text())
    assert content["quantization_config"]["ignore"] == ["bert.pooler.dense", "classifier"]
    result = quantizer.calibrate(model, EVERY_LINEAR, tokens())
    remarks = " ".join(result.export("compressed-tensors", tmp_path / "all").remarks)
    assert "vLLM builds bert.pooler.dense, classifier in float" in remarks


def test_a_block_of_several_places_stays_float() -> None:
    """As in Zamba 2: readers tie all of a shared block, also layers that one place runs."""
    model = llama(num_hidden_layers=2)
    model.config.use_cache = False
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    graph = trace(model, (), tokens()[0])
    config = load_text(Text("int8", json.dumps(EVERY_LINEAR))).require()
    placement = place_codes(graph, resolve_plan(config, graph, graph).specs)
    scopes = " ".join(node.scope for node in placement.linears.values())
    assert "layers.1.self_attn" in scopes
    assert "mlp" not in scopes
