"""The compressed-tensors target as transformers loads it: every format, the traps of its
readers, what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.extended import extended, extended_except
from support.llamas import llama, saved, tokens
from torch.nn.utils.parametrizations import weight_norm

import quantizer
from quantizer.api.result import Result
from quantizer.errors import QuantizerError, UsageError, VerificationError
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import CompressedCheckpoint
from quantizer.export.targets import EXPORTERS
from quantizer.storage.folder_list import LIST_FILE

pytestmark = pytest.mark.slow

TARGET = "compressed-tensors"
for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

Spec = dict[str, Any]
FLOAT = ["kind:embedding", "kind:head"]
LAYERS = [
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    *(f"self_attn.{part}_proj" for part in "koqv"),
]
PATHS = [f"model.layers.0.{layer}" for layer in LAYERS]


def integer(bits: int, *, symmetric: bool = True, **more: Any) -> Spec:
    kind = {
        "scale_type": "float",
        "round_method": "half_even",
        "is_dynamic": False,
        "symmetric": symmetric,
    }
    return {"dtype": f"int{bits}", **kind, **more}


CHANNEL: Spec = {
    "qscheme": "per_channel",
    "ch_axis": 0,
    "observer_cls": "PerChannelMinMaxObserver",
}
TENSOR: Spec = {"qscheme": "per_tensor", "observer_cls": "PerTensorMinMaxObserver"}
TOKEN: Spec = {"qscheme": "per_token", "is_dynamic": True}
GROUP: Spec = {
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 32,
    "observer_cls": "PerGroupMinMaxObserver",
}
FP8: Spec = {"dtype": "fp8_e4m3"}
INT4, INT8 = integer(4, **GROUP), integer(8, **CHANNEL)
MXFP4: Spec = {
    "dtype": "mx",
    "mx_element_dtype": "fp4",
    **GROUP,
    "observer_cls": "PerBlockMXObserver",
    "is_dynamic": False,
}
NVFP4: Spec = {
    "dtype": "fp4",
    "scale_format": "e4m3",
    **GROUP,
    "group_size": 16,
    "is_dynamic": False,
}
STATIC, DYNAMIC = integer(8, **TENSOR), integer(8, symmetric=False, **TOKEN)


def config(weight: Spec, inputs: Spec | None = None, **more: Any) -> dict[str, Any]:
    both = {"weight": weight} | ({"input_tensors": inputs} if inputs else {})
    return {"global_quant_config": {**both, "target_device": "CPU"}, "exclude": FLOAT, **more}


def calibrated(given: dict[str, Any], model: Any = None) -> Result:
    return quantizer.calibrate(model or llama(), given, tokens())


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "int4 in groups": (config(INT4), "pack-quantized"),
    "int3 in groups": (config(integer(3, **GROUP)), "pack-quantized"),
    "int2 with negative scales": (
        config(integer(2, **GROUP | {"symmetric_scale": "quant_min"})),
        "pack-quantized",
    ),
    "int4 per channel": (config(integer(4, **CHANNEL)), "pack-quantized"),
    "int8 per tensor": (config(integer(8, **TENSOR)), "pack-quantized"),
    "int8, static inputs": (config(INT8, STATIC), "int-quantized"),
    "int8, static asymmetric inputs": (
        config(INT8, integer(8, symmetric=False, **TENSOR)),
        "int-quantized",
    ),
    "asymmetric int8, static inputs": (
        config(integer(8, symmetric=False, **CHANNEL), STATIC),
        "int-quantized",
    ),
    "int8, dynamic inputs": (config(INT8, DYNAMIC), "int-quantized"),
    "int4, dynamic inputs": (config(INT4, DYNAMIC), "pack-quantized"),
    "fp8 alone": (config(FP8 | CHANNEL), "float-quantized"),
    "fp8, static inputs": (
        config(FP8 | TENSOR, FP8 | TENSOR | {"is_dynamic": False}),
        "float-quantized",
    ),
    "fp8, dynamic inputs": (config(FP8 | CHANNEL, FP8 | TOKEN), "float-quantized"),
}
FURTHER = ("int3 in groups", "int8 per tensor", "int8, static inputs", "int4, dynamic inputs")
"""Each of their settings is in another format, too."""
SEVERAL = config(
    INT4,
    layer_quant_config={
        "*.down_proj": {"weight": FP8 | CHANNEL, "input_tensors": FP8 | TOKEN},
        "*.gate_proj": {"weight": INT8, "input_tensors": DYNAMIC},
        "*.up_proj": {"weight": INT8, "input_tensors": DYNAMIC},
    },
    exclude=[*FLOAT, "*.o_proj"],
)


@pytest.mark.shows(
    "LLaMA (random), int8, int4, fp8, fp4, mixed", "transformers with compressed-tensors"
)
@pytest.mark.parametrize(
    "name", extended_except(FORMATS, *(name for name in FORMATS if name not in FURTHER))
)
def test_transformers_computes_what_test_mode_does(name: str, tmp_path: Path) -> None:
    given, layout = FORMATS[name]
    found = calibrated(given).export(TARGET, tmp_path / "out")
    # The reader finds ranges in float32, test mode in float64
    bound = 1e-6 if "dynamic" in name else 0.0
    assert found.max_difference <= bound
    remarks = ["no tokenizer is copied: the model does not come from a folder"]
    without_kernels = {
        "fp8, static inputs": "fp8 inputs with static scales",
        "int8 per tensor": "int8 weights with float inputs",
    }
    if name in without_kernels:
        form = without_kernels[name]
        text = (
            f"for vLLM on GPUs: its CPU build has no kernels for {form}, and refuses the folder"
        )
        remarks.insert(0, text)
    assert found.remarks == tuple(remarks)
    quantization = written(tmp_path / "out")["quantization_config"]
    assert quantization["quantization_status"] == "compressed", (
        "anything else is loaded with random weights"
    )
    assert [group["format"] for group in quantization["config_groups"].values()] == [layout]
    assert quantization["format"] == layout
    assert quantization["ignore"] == ["lm_head"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        value.dtype == torch.float32 for key, value in stored.items() if key.endswith("_scale")
    )


def test_several_widths_are_disjoint_groups_by_exact_name(tmp_path: Path) -> None:
    found = calibrated(SEVERAL).export(TARGET, tmp_path / "out")
    assert found.max_difference < 1e-6
    quantization = written(tmp_path / "out")["quantization_config"]
    groups = quantization["config_groups"].values()
    assert quantization["format"] == "mixed-precision"
    assert quantization["ignore"] == ["lm_head", "model.layers.0.self_attn.o_proj"]
    names = sorted(target for group in groups for target in group["targets"])
    fused = ["model.layers.0.mlp.gate_up_proj", "model.layers.0.self_attn.qkv_proj"]
    quantized = [path for path in PATHS if not path.endswith("o_proj")]
    assert names == sorted([*quantized, *fused])
    assert sorted(group["format"] for group in groups) == [
        *("float-quantized", "int-quantized", "pack-quantized")
    ]


def test_packed_asymmetric_weights_say_how_they_are_loaded(tmp_path: Path) -> None:
    """compressed-tensors 0.18 to 0.20 cannot load them by default, and with several groups in
    no other way either.
    """
    asymmetric = integer(4, symmetric=False, **GROUP)
    found = calibrated(config(asymmetric)).export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    assert "CompressedTensorsConfig(dequantize=True)" in found.remarks[0]
    assert 'set "symmetric" to true' in found.remarks[0]
    several = config(asymmetric, layer_quant_config={"*.down_proj": {"weight": INT8}})
    with pytest.raises(VerificationError, match="cannot run it") as refused:
        calibrated(several).export(TARGET, tmp_path / "several")
    assert refused.value.help == 'set "symmetric" to true for the weights'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_loaded_by_default_in_bfloat16(dtype: torch.dtype, tmp_path: Path) -> None:
    found = calibrated(config(MXFP4), llama().to(dtype)).export(TARGET, tmp_path / "out")
    # Bfloat16 sums differ in order
    assert found.max_difference <= (0.0 if dtype == torch.float32 else 0.01)
    assert any("dequantize=True" in remark for remark in found.remarks) == (
        dtype == torch.float32
    )
    assert written(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")


GPTQ: Spec = {"algo_config": {"name": "gptq"}}


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        (GPTQ, torch.float32),
        ({}, torch.bfloat16),
        *extended(({}, torch.float32), (GPTQ, torch.bfloat16)),
    ],
)
def test_nvfp4_has_a_scale_for_each_tensor_and_group(
    dtype: torch.dtype, algorithm: Spec, tmp_path: Path
) -> None:
    """Readers compute it in bfloat16, to which they round its values, whatever the model's
    dtype is.
    """
    found = calibrated(config(NVFP4, **algorithm), llama().to(dtype)).export(
        TARGET, tmp_path / "out"
    )
    assert found.max_difference < 0.01
    assert found.sqnr_db is not None and found.sqnr_db > 50
    assert any("nvfp4 in bfloat16" in remark for remark in found.remarks) == (
        dtype == torch.float32
    )
    quantization = written(tmp_path / "out")["quantization_config"]
    assert quantization["format"] == "nvfp4-pack-quantized"
    words = quantization["config_groups"]["group_0"]["weights"]
    assert (words["strategy"], words["group_size"], words["scale_dtype"]) == (
        "tensor_group",
        16,
        "torch.float8_e4m3fn",
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    names = [f"{PATHS[0]}.weight_{part}" for part in ("packed", "scale", "global_scale")]
    kinds = [(stored[name].dtype, list(stored[name].shape)) for name in names]
    weight = llama().get_parameter(f"{PATHS[0]}.weight")
    rows, columns = weight.shape
    assert kinds == [
        (torch.uint8, [rows, columns // 2]),
        (torch.float8_e4m3fn, [rows, columns // 16]),
        (torch.float32, [1]),
    ]
    usual = 448 * 6 / weight.to(dtype).abs().max().item()
    assert stored[names[2]].item() == pytest.approx(usual, rel=1e-6)


def test_scales_in_bfloat16_cost_less_than_quantization(tmp_path: Path) -> None:
    """The reader casts them to the model's dtype."""
    result = calibrated(config(INT4), llama().bfloat16())
    found = result.export(TARGET, tmp_path / "out")
    assert found.sqnr_db is not None
    assert found.sqnr_db > result.test().metrics["sqnr_db"] + 10
    assert "quantization_config" in written(tmp_path / "out")


@pytest.mark.parametrize("status", ["frozen", "initialized"])
def test_random_weights_would_be_noticed(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CompressedCheckpoint.quantization_config
    monkeypatch.setattr(
        CompressedCheckpoint,
        "quantization_config",
        lambda self: plain(self) | {"quantization_status": status},
    )
    with pytest.raises(VerificationError, match=r"out is not written: .* finds .* missing"):
        calibrated(config(INT4)).export(TARGET, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_wrong_codes_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an earlier export does not stay as if it were this one."""
    result = calibrated(config(INT4))
    result.export(TARGET, tmp_path / "out")
    plain = CompressedCheckpoint.stored
    name = f"{PATHS[0]}.weight_packed"
    monkeypatch.setattr(
        CompressedCheckpoint,
        "stored",
        lambda self: (found := plain(self)) | {name: found[name].flip(0)},
    )
    with pytest.raises(VerificationError, match="does not compute what test mode does"):
        result.export(TARGET, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_names_are_those_that_readers_know(tmp_path: Path) -> None:
    calibrated(config(INT4), llama(tie_word_embeddings=True)).export(TARGET, tmp_path / "out")
    layers = {
        f"{path}.weight_{part}" for path in PATHS for part in ("packed", "scale", "shape")
    }
    norms = {f"model.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")}
    floats = {"model.embed_tokens.weight", "model.norm.weight", *norms}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == layers | floats, (
        "a tied head is left out"
    )


def test_the_folder_keeps_what_the_model_came_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    source = saved(tmp_path / "float", llama())
    stated = written(source) | {"torch_dtype": "float32", "our_field": [1, 2]}
    (source / "config.json").write_text(json.dumps(stated | {"quantization_config": None}))
    (source / "additional_chat_templates").mkdir()
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "generation_config.json",
        "tekken.json",
        "modeling.py",
        "model.bin",
    ):
        (source / name).write_text("{}" if name.endswith("json") else name)
    of_floats = {"quantization": {"quant_algo": None}}
    (source / "hf_quant_config.json").write_text(json.dumps(of_floats))
    monkeypatch.setattr("quantizer.storage.files.MAX_SHARD_BYTES", 20_000)
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    found = calibrated(config(INT4), model).export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    assert found.remarks == ("not copied from float: modeling.py",)
    found_config = written(tmp_path / "out")
    assert found_config.pop("quantization_config")["quant_method"] == TARGET
    assert found_config == stated
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert shards[0] == f"model-00001-of-0000{len(shards)}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    copied = [
        LIST_FILE,
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tekken.json",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").is_file()
    others = sorted(
        path.name for path in (tmp_path / "out").iterdir() if "safetensors" not in path.name
    )
    assert others == copied
    with pytest.raises(UsageError, match=r"float holds .* and is not a folder of quantizer's"):
        calibrated(config(INT4), model).export(TARGET, source)
    assert (source / "modeling.py").exists()


def test_two_exports_are_equal_and_one_replaces_the_other(tmp_path: Path) -> None:
    for name in ("one", "other", "one"):
        calibrated(config(INT4)).export(TARGET, tmp_path / name)
    one, other = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.name != LIST_FILE}
        for name in ("one", "other")
    )
    assert one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


ALGORITHMS = {
    "gptq": {"algo_config": {"name": "gptq", "desc_act": True, "static_groups": True}},
    "awq": {"algo_config": {"name": "awq"}},
    "smoothquant": {"pre_quant_opt_config": {"name": "smoothquant"}},
    "rotation": {"pre_quant_opt_config": {"name": "rotation", "online": False}},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_that_algorithms_changed(name: str, tmp_path: Path) -> None:
    found = calibrated(config(INT4, **ALGORITHMS[name])).export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    stored, before = load_file(tmp_path / "out" / "model.safetensors"), llama().state_dict()
    floats = [key for key in before if key in stored]
    assert all(torch.equal(stored[key], before[key]) for key in floats) == (name == "gptq")


def test_quantized_embeddings_are_values_and_so_is_a_head_that_shares_them(
    tmp_path: Path,
) -> None:
    model = llama(tie_word_embeddings=True)
    found = calibrated(config(INT8) | {"exclude": []}, model).export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    assert "embed_tokens" in found.remarks[0]
    assert "lm_head" in found.remarks[0]
    assert not torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"],
        model.lm_head.weight,
    )


INPUT = r"input of LlamaForCausalLM::.* "
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "dynamic symmetric": (
        config(INT8, integer(8, **TOKEN)),
        {},
        INPUT + "is dynamic with the scale absmax / 127, and readers have absmax / 127.5",
        "set its symmetric to false and its scale_type to float, or its is_dynamic to false",
    ),
    "half_up": (
        config(INT8, STATIC | {"round_method": "round"}),
        {},
        INPUT + "is rounded",
        "half_even",
    ),
    "few bits": (
        config(INT8, integer(4, **TENSOR)),
        {},
        INPUT + "has 4 bits, and engines compute in 8",
        "8 bits",
    ),
    "of two kinds": (
        config(INT8, FP8 | TENSOR),
        {},
        INPUT + "and weight are fp8_e4m3/int",
        "int8 or fp8_e4m3",
    ),
    "16 bits": (
        config(integer(16, **CHANNEL)),
        {},
        "weights of .* has 16 bits",
        "8 bits or less",
    ),
    "fp8 in groups": (
        config(FP8 | GROUP),
        {},
        "weights of .* is fp8_e4m3 in groups, which readers have with shared exponents",
        "per_channel",
    ),
    "fp6": (
        config({"dtype": "fp6_e2m3", **TENSOR}),
        {},
        "weights of .* is fp6_e2m3",
        "fp8_e4m3, mxfp4, mxfp8 or nvfp4",
    ),
    "mx9": (
        config({"dtype": "mx9", "ch_axis": 1}),
        {},
        "weights of .* is mx9, which the format lacks",
        "int2 to int8",
    ),
    "nvfp4 of 32": (
        config(NVFP4 | {"group_size": 32}),
        {},
        "of 16 with e4m3 scales",
        "set its group_size to 16",
    ),
    "nvfp4 inputs": (
        config(NVFP4, NVFP4 | {"ch_axis": -1, "is_dynamic": True}),
        {},
        INPUT + "finds the factor of its groups at run time, and readers have that of",
        'set its is_dynamic to "local"',
    ),
    "outputs": (
        config(INT8)
        | {
            "global_quant_config": {
                "weight": INT8,
                "output_tensors": STATIC,
                "target_device": "CPU",
            }
        },
        {},
        r"activation of .*q_proj\]/linear.* is quantized between operators",
        "quantize only inputs of linear layers",
    ),
    "a tied head alone": (
        config(INT8) | {"exclude": ["kind:embedding"]},
        {"tie_word_embeddings": True},
        r"weights of .*lm_head.* is the weight of .*embed_tokens.*, too",
        "kind:head and kind:embedding",
    ),
    "online rotations": (
        config(INT4, DYNAMIC, pre_quant_opt_config={"name": "rotation"}),
        {},
        "was inserted by an algorithm",
        "no online rotations",
    ),
    "no layer": (
        config(INT8) | {"exclude": ["*"]},
        {},
        "finds no linear layer",
        "quantize weights",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_checkpoint_cannot_say_is_refused_by_layer_and_key(
    name: str, tmp_path: Path
) -> None:
    given, settings, why, remedy = REFUSED[name]
    with pytest.raises(UsageError, match=why) as refused:
        calibrated(given, llama(**settings)).export(TARGET, tmp_path / "out")
    assert remedy in str(refused.value.help)
    assert not list(tmp_path.iterdir())


def albert() -> Any:
    """A model whose two layers are one module."""
    import transformers

    sizes = {"hidden_size": 32, "embedding_size": 16, "intermediate_size": 32}
    settings = transformers.AlbertConfig(
        vocab_size=64, num_hidden_layers=2, num_attention_heads=2, **sizes
    )
    torch.manual_seed(0)
    return transformers.AlbertModel(settings).eval()


def test_static_inputs_of_a_module_that_is_called_twice_are_refused(tmp_path: Path) -> None:
    """Dynamic inputs have no scale to store."""
    model = albert()
    inputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    weights = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    why = r"ffn.* is of a module that is called several times, and a checkpoint has one static"
    with pytest.raises(UsageError, match=why) as refused:
        calibrated(config(weights, inputs), model).export(TARGET, tmp_path / "out")
    assert "is_dynamic to true" in str(refused.value.help)
    dynamic = inputs | {"qscheme": "per_token", "is_dynamic": True}
    verified = calibrated(config(weights, dynamic), model).export(TARGET, tmp_path / "out")
    assert verified.sqnr_db > 60


def test_a_module_that_is_called_twice_is_not_rounded_twice(tmp_path: Path) -> None:
    place = {"folder": tmp_path / "out", "to": "w4"}
    why = r"query.*linear.1.*each is of a module that is called several times: gptq rounds it"
    with pytest.raises(UsageError, match=why):
        quantizer.quantize(albert(), tokens(), config=config(INT8, **GPTQ), **place)
    assert not list(tmp_path.iterdir())


def test_a_rounded_weight_that_the_model_computes_is_refused(tmp_path: Path) -> None:
    model = llama()
    weight_norm(model.model.layers[0].mlp.up_proj)
    with pytest.raises(
        UsageError, match=r"up_proj.* is computed from other tensors"
    ) as refused:
        calibrated(config(INT8), model).export(TARGET, tmp_path / "out")
    assert "exclude it" in str(refused.value.help)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(32, 8))
    result = quantizer.calibrate(plain, config(INT8) | {"exclude": []}, [torch.ones(2, 32)])
    with pytest.raises(UsageError, match="a Sequential without a config of transformers"):
        result.export(TARGET, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error_about_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot use .*out: file is not a folder"):
        calibrated(config(INT4)).export(TARGET, tmp_path / "file" / "out")


def test_remarks_are_part_of_verify_json() -> None:
    assert Verification("outputs", 0.0, 0.0, 1.0, remarks=("load it so",)).to_json()[
        "remarks"
    ] == ("load it so",)
    assert "remarks" not in Verification("outputs", 0.0, 0.0, 1.0).to_json()
    assert issubclass(VerificationError, QuantizerError)
