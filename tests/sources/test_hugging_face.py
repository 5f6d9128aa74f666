"""Folders of Hugging Face models are data: their code does not run, and weights that are
missing are no random ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.llamas import llama, saved

from quantizer.cli.main import run_command
from quantizer.errors import DataError, ModelError
from quantizer.sources.models import load_model
from quantizer.sources.texts.tokenizer import load_tokenizer

CODE = """
from pathlib import Path
from typing import Any
Path(__file__ + ".ran").touch()
Path(MARK).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizer

class OwnConfig(LlamaConfig):
    model_type = "own"

class Own(LlamaForCausalLM):
    config_class = OwnConfig

class Words(PreTrainedTokenizer):
    vocab_size = 3
    def __init__(self, **settings):
        super().__init__(**settings)
    def get_vocab(self):
        return {"a": 0, "b": 1, "<unk>": 2}
    def _tokenize(self, text):
        return text.split()
    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 2)
    def _convert_id_to_token(self, index):
        return "ab?"[index]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and a tokenizer in code of their own; whoever is asked whether to run it says
    yes.
    """
    place = saved(tmp_path / "model", llama())
    (place / "own.py").write_text(CODE.replace("MARK", repr(str(tmp_path / "ran"))))
    config = json.loads((place / "config.json").read_text())
    named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    config |= {"architectures": ["Own"], "model_type": "own", "auto_map": named}
    (place / "config.json").write_text(json.dumps(config))
    words = {"auto_map": {"AutoTokenizer": ["own.Words", None]}, "tokenizer_class": "Words"}
    (place / "tokenizer_config.json").write_text(json.dumps(words))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    return place


def test_code_of_a_folder_runs_only_where_it_is_trusted(folder: Path) -> None:
    with pytest.raises(ModelError, match="Own is code in this folder") as caught:
        load_model(str(folder))
    assert "--trust" in (caught.value.help or "")
    with pytest.raises(
        DataError, match=r"the tokenizer of .* is code in this folder"
    ) as refused:
        load_tokenizer(folder)
    assert "--trust" in (refused.value.help or "")
    assert not (folder.parent / "ran").exists()
    assert load_model(str(folder), trust=True).name == "Own"
    assert (folder.parent / "ran").exists()
    assert load_tokenizer(folder, trust=True).encode("a b a") == [0, 1, 0]


def test_a_known_class_is_made_without_the_code_beside_it(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder)).name == "LlamaForCausalLM"
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("name", ["AutoModel", "AutoModelForCausalLM"])
def test_an_auto_class_does_not_find_code_for_a_quantized_folder(
    name: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    config |= {"architectures": [name], "model_type": "llama", "quantization_config": method}
    config["auto_map"] = {name: "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj.weight"
    rows, columns = stored[layer].shape
    stored[layer] = stored[layer].to(torch.float8_e4m3fn)
    stored[f"{layer}_scale_inv"] = torch.ones(-(-rows // 16), -(-columns // 16))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"own\.Own is code in this folder"):
        load_model(str(folder))
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": {"text_config": "paged|someone/kernel@v1"}},
        {"text_config": {"attn_implementation": "someone/kernel:name"}},
    ],
)
def test_a_config_loads_no_kernel_from_the_hub(fields: dict[str, Any], tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=r"names the kernel '.*someone/kernel.* on the hub"):
        load_model(str(place))


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": 10**7}, {"num_labels": 10**8}, {"vision": {"n_layer": 10**9}}],
)
def test_a_config_cannot_ask_for_any_number_of_parts(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    place = saved(tmp_path / "model", llama())
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=r"config\.json asks for \w+ 10+, more than a model"):
        load_model(str(place))


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    tensors = load_file(place / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lacks 1 weight of LlamaForCausalLM: model\.layers\.0\.mlp\.up_proj"
    ):
        load_model(str(place))


OUTSIDE = (
    "../other/model.safetensors",
    "{elsewhere}/model.safetensors",
    "sub/../../other/model.safetensors",
)


@pytest.mark.parametrize("kind", ["index", "config", "index of config"])
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("trust", [False, True])
def test_a_folder_names_its_own_files_only(
    kind: str, name: str, trust: bool, tmp_path: Path
) -> None:
    place, other = (saved(tmp_path / each, llama()) for each in ("model", "other"))
    name = name.format(elsewhere=other)
    weights = load_file(place / "model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)})
    config = json.loads((place / "config.json").read_text())
    if kind == "index":
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text(index)
    elif kind == "config":
        config["transformers_weights"] = name
    else:
        config["transformers_weights"] = "own.safetensors.index.json"
        (place / "own.safetensors.index.json").write_text(index)
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="names a file outside its folder") as caught:
        load_model(str(place), trust=trust)
    assert name in caught.value.message


@pytest.mark.parametrize("index", ['{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_names_no_files_is_a_sentence(index: str, tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "model.safetensors").unlink()
    (place / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="its weight_map does not name files"):
        load_model(str(place))


def test_an_index_may_name_files_in_folders_below(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "below").mkdir()
    (place / "model.safetensors").rename(place / "below" / "part.safetensors")
    weights = load_file(place / "below" / "part.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "below/part.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(str(place)).name == "LlamaForCausalLM"


@pytest.mark.slow
def test_a_model_of_transformers_from_a_factory_needs_no_switch(tmp_path: Path) -> None:
    """Its cache of keys is on by default, and no trace could keep it."""
    (tmp_path / "net.py").write_text(
        "from support.llamas import llama, tokens as calibration_data\n\nmodel = llama\n"
    )
    config = Path(__file__).parents[2] / "configs" / "weight_int8.json"
    given = ["--model", str(tmp_path / "net.py"), "--output_dir", str(tmp_path / "out"), "-q"]
    assert run_command(["--quant_mode", "calib", *given, "--config_file", str(config)]) == 0
    assert run_command(["--quant_mode", "test", *given]) == 0


@pytest.mark.parametrize(
    "config", ['{"architectures": ["nn"]}', '{"architectures": ["NoModel"]}', "[1]", "{"]
)
def test_a_config_that_names_no_model_is_a_sentence(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json|transformers, loading"):
        load_model(str(tmp_path))


def refusal(place: Path) -> tuple[str, str]:
    """The message and the help of the error of loading a folder."""
    with pytest.raises(ModelError) as caught:
        load_model(str(place))
    return caught.value.message, str(caught.value.help)


@pytest.mark.parametrize(
    ("content", "reason", "remedy"),
    [
        (None, "has no weights: there is no model.safetensors", "download the whole model"),
        (b"version https://git-lfs.github.com/spec/v1", "it is a Git LFS pointer", "git lfs"),
        (b"", "model.safetensors cannot be read: it is empty", "download it again"),
        (b"\x08" + b"\0" * 99, "model.safetensors cannot be read: it is truncated", "again"),
    ],
)
def test_weights_that_are_missing_or_damaged_name_their_file(
    content: bytes | None, reason: str, remedy: str, tmp_path: Path
) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "model.safetensors").unlink()
    if content is not None:
        (place / "model.safetensors").write_bytes(content)
    message, help_ = refusal(place)
    assert reason in message
    assert remedy in help_


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
    message, remedy = refusal(place)
    assert "there is no model.safetensors, and no model.safetensors.index.json" in message
    assert remedy == "copy or download the whole model"


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    message, remedy = refusal(place)
    assert "has its weights in pytorch_model.bin, a pickle" in message
    assert "LlamaForCausalLM.from_pretrained(" in remedy


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"model_type": "lama"}, "has the model_type 'lama'", "did you mean llama?"),
        (
            {"intermediate_size": 128},
            "model.layers.0.mlp.down_proj.weight [64, 96] instead of [64, 128]",
            "give the config.json that was saved with these weights",
        ),
    ],
)
def test_a_config_of_other_weights_is_refused(
    change: dict[str, object], reason: str, remedy: str, tmp_path: Path
) -> None:
    place = saved(tmp_path / "model", llama())
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | change))
    message, help_ = refusal(place)
    assert reason in message
    assert remedy in help_


def test_a_config_that_is_no_json_has_its_place(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "config.json").write_text('{\n  "model_type": "llama",\n}')
    message, _ = refusal(place)
    assert message.startswith(f"{place / 'config.json'}:3:1 is not JSON: ")


OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "model.safetensors.index.json",
)
DAMAGE = {
    "empty": (b"", " cannot be read: it is empty"),
    "cut": (b'{\n "a": [1,\n', ":3:1 is not JSON: Expecting value"),
    "a mark": (b"\xef\xbb\xbf{}", ":1:1 is not JSON: Unexpected UTF-8 BOM"),
    "16 bits": ("{}".encode("utf-16"), ":1 is not UTF-8 text: byte 0xff at offset 0"),
    "Latin-1": (b'{\n"a": "\xe9"}', ":2 is not UTF-8 text: byte 0xe9 at offset 8"),
    "a list": (b"[1]", ":1 is a list, not an object"),
    "null": (b"null", ":1 is None, not an object"),
    "deep": (b"[" * 100_000, ":1 is not JSON: maximum recursion depth exceeded"),
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1",
        " cannot be read: it is a Git",
    ),
    "a folder": (None, " cannot be read: Is a directory"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_damaged_file_of_a_folder_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    """Also files that only engines read, from the copy in the written checkpoint."""
    place = saved(tmp_path / "model", llama())
    file = place / name
    for content, reason in DAMAGE.values():
        file.unlink(missing_ok=True)
        if content is None:
            file.mkdir()
        else:
            file.write_bytes(content)
        if content is None and name == "config.json":
            reason = "a folder without a config.json"
        assert reason in refusal(place)[0]


def test_a_damaged_file_beside_a_tokenizer_is_named(tmp_path: Path) -> None:
    """Where the tokenizer is not in the model's folder."""
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{\n")
    with pytest.raises(DataError, match=r"tokenizer_config\.json:2:1 is not JSON: "):
        load_tokenizer(tmp_path)


def test_a_damaged_chat_template_is_named(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    (place / "chat_template.jinja").write_bytes("{{ messages }}".encode("utf-16"))
    assert "chat_template.jinja:1 is not UTF-8 text" in refusal(place)[0]


QUERY = "model.layers.0.self_attn.q_proj"


def changed(place: Path, change: Any, **config: Any) -> Path:
    """The folder of a LLaMA whose tensors were changed, with more fields of its config."""
    saved(place, llama())
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps(fields))
    return place


def as_codes(tensors: dict[str, Any]) -> None:
    tensors[f"{QUERY}.weight"] = tensors[f"{QUERY}.weight"].to(torch.int8)
    tensors[f"{QUERY}.weight_scale"] = torch.ones(64)


@pytest.mark.parametrize(
    "name", [f"{QUERY}.lora_A.weight", f"{QUERY}.bias", "model.layers.0.self_attn.k_scale"]
)
def test_a_tensor_that_would_change_a_layer_is_refused(name: str, tmp_path: Path) -> None:
    place = changed(tmp_path / "m", lambda tensors: tensors.update({name: torch.ones(64)}))
    message, _ = refusal(place)
    assert f"1 tensor that LlamaForCausalLM lacks, in layers that it runs: {name}" in message


def test_codes_without_a_method_are_refused(tmp_path: Path) -> None:
    message, _ = refusal(changed(tmp_path / "a", as_codes))
    assert "stores 1 weight as codes (int8), and config.json has no" in message
    name = f"{QUERY}.weight"
    place = changed(
        tmp_path / "b",
        lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}),
    )
    assert "stores 1 weight as codes (float8_e4m3fn)" in refusal(place)[0]


def test_a_method_may_stand_in_another_field_or_file(tmp_path: Path) -> None:
    place = changed(tmp_path / "a", as_codes, compression_config={"quant_method": "vendor's"})
    assert "is quantized by vendor's, which quantizer cannot dequantize" in refusal(place)[0]
    place = changed(tmp_path / "b", as_codes)
    settings = {"quantization": {"quant_algo": "FP8"}}
    (place / "hf_quant_config.json").write_text(json.dumps(settings))
    assert "stores 1 weight as codes (int8)" in refusal(place)[0]


def test_an_index_beside_a_file_that_it_does_not_name_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path / "model", llama())
    weights = load_file(place / "model.safetensors")
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    assert load_model(str(place)).name == "LlamaForCausalLM"
    save_file(weights, place / "model-1.safetensors", metadata={"format": "pt"})
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model-1.safetensors")}))
    message, _ = refusal(place)
    assert "model.safetensors and model.safetensors.index.json, which names model-1" in message
