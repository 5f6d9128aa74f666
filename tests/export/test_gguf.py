"""The gguf target as transformers loads it: every type of blocks, templates, known
architectures, what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended, extended_except
from support.llamas import SIZES, llama, tokens
from support.runs import ROOT

import quantizer
from quantizer.api.result import Result
from quantizer.calibration.solution import quantized_network
from quantizer.cli.main import run_command
from quantizer.commands.start.start import _STRATEGIES
from quantizer.errors import ResultError, UsageError, VerificationError
from quantizer.export.agreement import Verification
from quantizer.export.exporting import as_run
from quantizer.export.targets import EXPORTERS

for package in EXPORTERS["gguf"].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
import gguf
import transformers
from support.gguf_templates import template

from quantizer.export.gguf.file import Arrangement

pytestmark = pytest.mark.slow

Spec = dict[str, Any]
GROUP: Spec = {
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 32,
    "observer_cls": "PerGroupMinMaxObserver",
}
CHANNEL: Spec = {
    "qscheme": "per_channel",
    "ch_axis": 0,
    "observer_cls": "PerChannelMinMaxObserver",
}
TENSOR: Spec = {"qscheme": "per_tensor", "observer_cls": "PerTensorMinMaxObserver"}
NET = """
from support.llamas import llama, tokens as calibration_data

def model():
    return llama(use_cache=False)
"""
PRESETS = [name for name in _STRATEGIES if name.startswith("gguf_")]


def integer(dtype: str, *, symmetric: bool = True, **more: Any) -> Spec:
    kind = {
        "scale_type": "float",
        "round_method": "half_even",
        "is_dynamic": False,
        "symmetric": symmetric,
    }
    return {"dtype": dtype, **kind, **(more or GROUP)}


def config(weight: Spec, **more: Any) -> dict[str, Any]:
    return {"global_quant_config": {"weight": weight, "target_device": "CPU"}, **more}


def preset(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "configs" / f"{name}.json").read_text())
    return found


def calibrated(given: dict[str, Any], model: Any = None) -> Result:
    return quantizer.calibrate(model or llama(), given, tokens())


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def without_remarks(found: Verification) -> tuple[float, float]:
    return found.max_difference, found.equal


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (preset(name), name[5:].removesuffix("_m").upper()) for name in PRESETS},
    "int3 in groups of 64": (
        config(integer("int3", **GROUP | {"group_size": 64}), exclude=["*.down_proj"]),
        "Q4_0",
    ),
    "int4 with negative scales": (
        config(integer("int4", **GROUP | {"symmetric_scale": "quant_min"})),
        "Q4_0",
    ),
    "int8 per channel": (config(integer("int8", **CHANNEL)), "Q8_0"),
    "asymmetric int4 per tensor": (config(integer("int4", symmetric=False, **TENSOR)), "Q4_1"),
    "powers of two": (config(integer("int8") | {"scale_type": "pof2"}), "Q8_0"),
    "float16": (config({"dtype": "float16"}), "F16"),
}


SUPER_BLOCKS = ("gguf_q4_k", "gguf_q4_k_m", "gguf_q5_k", "gguf_q5_k_m", "gguf_q6_k")
AS_GOOD_AS_GGUF = ("gguf_q4_0", "gguf_q5_0", "gguf_q4_1", "gguf_q5_1", "gguf_q8_0")
HAS_EXACT_SCALES = ("powers of two", "float16", *SUPER_BLOCKS)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_what_test_mode_does(name: str, tmp_path: Path) -> None:
    given, kind = CONFIGS[name]
    sizes = {"hidden_size": 256, "intermediate_size": 256} if name in SUPER_BLOCKS else {}
    found = calibrated(given, llama(**sizes)).export("gguf", tmp_path / "net.gguf")
    assert without_remarks(found) == (0.0, 1.0)
    assert "no tokenizer" in found.remarks[0]
    rounded = "scales are rounded to float16" in str(found.remarks[1:])
    assert rounded == (name not in HAS_EXACT_SCALES)
    written = kinds(tmp_path / "net.gguf")
    assert written["blk.0.attn_q.weight"] == kind
    assert written["output_norm.weight"] == "F32"
    assert [path.name for path in tmp_path.iterdir()] == ["net.gguf"]
    if name == "gguf_q4_k_m":
        fields = gguf.GGUFReader(tmp_path / "net.gguf").fields
        assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    if name in AS_GOOD_AS_GGUF:
        stored, reference = errors_of_up_projection(tmp_path / "net.gguf")
        assert stored <= reference


def errors_of_up_projection(path: Path) -> tuple[float, float]:
    """The squared error of a weight in a file, and that of the reference in the package gguf."""
    weight = llama().model.layers[0].mlp.up_proj.weight.detach().numpy()
    rows = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    row = rows["blk.0.ffn_up.weight"]
    reference = gguf.quantize(weight, row.tensor_type)
    errors = []
    for blocks in (row.data, reference):
        difference = gguf.dequantize(blocks, row.tensor_type) - weight
        errors.append(float((difference.astype("float64") ** 2).sum()))
    return errors[0], errors[1]


@pytest.mark.parametrize(
    ("tied", "embedding", "head", "types"),
    [
        (False, integer("int4", **GROUP), integer("int8", **GROUP), ["Q4_0", "Q8_0"]),
        (False, integer("int8", **GROUP), {"dtype": "bfloat16"}, ["Q8_0", "BF16"]),
        (True, integer("int8", **GROUP), integer("int8", **GROUP), ["Q8_0"]),
    ],
)
def test_embeddings_and_heads_have_types_of_their_own(
    tied: bool, embedding: Any, head: Any, types: list[str], tmp_path: Path
) -> None:
    entries = {"kind:embedding": {"weight": embedding}, "kind:head": {"weight": head}}
    given = config(integer("int4"), layer_quant_config=entries)
    model = llama(tie_word_embeddings=tied)
    found = calibrated(given, model).export("gguf", tmp_path / "net.gguf")
    assert without_remarks(found) == (0.0, 1.0)
    written = kinds(tmp_path / "net.gguf")
    names = ("token_embd.weight", "output.weight")
    assert [written[name] for name in names if name in written] == types


def test_widths_may_differ_by_layer_and_float_layers_stay(tmp_path: Path) -> None:
    given = config(
        integer("int4"),
        layer_quant_config={
            "*.down_proj": {"weight": integer("int8")},
            "*.v_proj": {"weight": integer("int5")},
        },
        exclude=["kind:embedding", "kind:head", "*.o_proj"],
    )
    found = calibrated(given, llama(tie_word_embeddings=True)).export(
        "gguf", tmp_path / "net.gguf"
    )
    assert without_remarks(found) == (0.0, 1.0)
    written = kinds(tmp_path / "net.gguf")
    assert "output.weight" not in written, "a tied head is left out"
    layers = {"attn_q": "Q4_0", "ffn_down": "Q8_0", "attn_v": "Q5_0", "attn_output": "F32"}
    assert {name: written[f"blk.0.{name}.weight"] for name in layers} == layers
    assert written["token_embd.weight"] == "F32"
    # Mostly Q4_0
    assert gguf.GGUFReader(tmp_path / "net.gguf").fields["general.file_type"].contents() == 2


ALGORITHMS = {
    "gptq": {"algo_config": {"name": "gptq", "desc_act": True, "static_groups": True}},
    "awq": {"algo_config": {"name": "awq"}},
    "rotation": {"pre_quant_opt_config": {"name": "rotation", "online": False}},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_that_algorithms_changed(name: str, tmp_path: Path) -> None:
    model = llama()
    base = template(tmp_path / "base.gguf", model)
    result = calibrated(config(integer("uint4", symmetric=False), **ALGORITHMS[name]), model)
    found = result.export("gguf", tmp_path / "net.gguf", gguf_template=base)
    assert without_remarks(found) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gptq", "iq4_nl"), ("imatrix", "q4_k"), *extended(("awq", "iq4_nl"))]
)
def test_formats_of_llama_cpp_with_algorithms(name: str, dtype: str, tmp_path: Path) -> None:
    model = llama(hidden_size=256, intermediate_size=256)
    # A template has a place for no inserted layers
    algorithm = {"name": name, "online": False} if name == "awq" else {"name": name}
    given = preset(f"gguf_{dtype}") | {"algo_config": algorithm}
    found = calibrated(given, model).export("gguf", tmp_path / "net.gguf")
    assert without_remarks(found) == (0.0, 1.0)
    assert kinds(tmp_path / "net.gguf")["blk.0.attn_q.weight"] == dtype.upper()


@pytest.mark.parametrize("kind", ["Q4_1", *extended("F16", "Q8_0")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_template_keeps_all_but_the_models_tensors(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=tied)
    base = template(tmp_path / "base.gguf", model, kind)
    found = calibrated(preset("gguf_q4_0"), model).export(
        "gguf", tmp_path / "net.gguf", gguf_template=base
    )
    assert without_remarks(found) == (0.0, 1.0)
    assert not any("tokenizer" in remark for remark in found.remarks)
    before, after = gguf.GGUFReader(base), gguf.GGUFReader(tmp_path / "net.gguf")
    counted = {"GGUF.kv_count", "general.file_type"}
    assert {
        key: field.contents() for key, field in before.fields.items() if key not in counted
    } == {key: field.contents() for key, field in after.fields.items() if key not in counted}
    assert after.fields["custom.list"].contents() == [1, 2, 3]
    assert [tensor.name for tensor in after.tensors] == [
        tensor.name for tensor in before.tensors
    ]
    assert kinds(tmp_path / "net.gguf")["rope_freqs.weight"] == "F32"


def test_one_file_serves_as_the_template_of_the_next_and_two_are_equal(tmp_path: Path) -> None:
    result = calibrated(preset("gguf_q5_0"))
    result.export("gguf", tmp_path / "one.gguf")
    result.export("gguf", tmp_path / "other.gguf", gguf_template=tmp_path / "one.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


@pytest.mark.parametrize("by_template", [False, True])
def test_rows_that_are_not_permuted_would_be_noticed(
    by_template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes are the same, so readers do not complain; an earlier file in a result folder
    does not stay as if it were this one.
    """
    model = llama()
    base = template(tmp_path / "base.gguf", model) if by_template else ""
    result = calibrated(preset("gguf_q8_0"), model)
    result.save(tmp_path / "results")
    path = tmp_path / "results" / "net.gguf"
    result.export("gguf", path, gguf_template=base)
    monkeypatch.setattr(Arrangement, "rows", lambda self, x: x)
    with pytest.raises(
        (VerificationError, UsageError),
        match=r"does not compute what test mode does|is not the model",
    ):
        result.export("gguf", path, gguf_template=base)
    assert not path.exists()


ARCHITECTURES = {
    "mistral": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SIZES, sliding_window=None),
    ),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES)),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, head_dim=128)),
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config(**SIZES, pad_token_id=0, eos_token_id=2),
    ),
}


@pytest.mark.parametrize("name", extended_except(ARCHITECTURES, "qwen2", "qwen3", "phi3"))
def test_known_architectures_need_no_template(name: str, tmp_path: Path) -> None:
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = kind(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms say something, too
            parameter.add_(torch.randn_like(parameter) * 0.02)
    found = calibrated(preset("gguf_q4_0"), model).export("gguf", tmp_path / "net.gguf")
    assert without_remarks(found) == (0.0, 1.0)


def test_a_template_tells_what_is_added_to_norms(tmp_path: Path) -> None:
    """Gemma's norms multiply by 1 + weight, and llama.cpp's files have the sum."""
    sizes = {**SIZES, "head_dim": 256, "pad_token_id": 0, "sliding_window": 8}
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**sizes, attn_implementation="eager")
    ).eval()
    writer = gguf.GGUFWriter(tmp_path / "base.gguf", "gemma2")
    writer.add_context_length(32)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(256)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(8)
    writer.add_vocab_size(64)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA2, 1)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            value = tensor.normal_(0, 0.1) + 1 if "norm" in name else tensor
            writer.add_tensor(names.get_name(name, (".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    base = tmp_path / "base.gguf"
    found = calibrated(preset("gguf_q8_0"), model).export(
        "gguf", tmp_path / "net.gguf", gguf_template=base
    )
    assert found.max_difference < 1e-5, "1 + weight is rounded"


def test_test_mode_counts_what_halfs_round(tmp_path: Path) -> None:
    """The solution as it runs is the file's, to the last bit, and rounding it again changes
    nothing.
    """
    result = calibrated(preset("gguf_q5_1"))
    graph, solution = result._calibrated.graph, result._calibrated.solution
    run = as_run(["gguf"], graph, solution)
    again = as_run(["gguf"], graph, run)
    changed = 0
    for key, tensor in run.tensors.items():
        before = solution.tensors[key]
        assert tensor.codes is not None
        assert before.codes is not None
        assert torch.equal(tensor.codes, before.codes)
        assert torch.equal(tensor.scale, tensor.scale.half().float())
        minimum = tensor.scale * tensor.zero_point
        assert torch.equal(minimum, minimum.half().float())
        assert torch.equal(again.tensors[key].scale, tensor.scale)
        changed += int((tensor.scale != before.scale).sum())
    assert changed
    result.export("gguf", tmp_path / "net.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="net.gguf", dtype=torch.float32
    )
    call = tokens(1)[0]
    with torch.no_grad():
        expected = quantized_network(graph, run)(**call)
        assert torch.equal(model(**call).logits, expected.logits)


def test_scales_below_all_halfs_take_the_least_one(tmp_path: Path) -> None:
    """And codes move to where the values are."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e-7)
    found = calibrated(preset("gguf_q8_0"), model).export("gguf", tmp_path / "net.gguf")
    assert without_remarks(found) == (0.0, 1.0)


def test_half_models_stay_half(tmp_path: Path) -> None:
    given = preset("gguf_q4_0") | {"exclude": ["*.o_proj"]}
    for dtype, kind in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        path = tmp_path / f"{kind}.gguf"
        found = calibrated(given, llama().to(dtype)).export("gguf", path)
        assert found.max_difference < 0.01, "sums in 16 bits differ in order"
        assert kinds(path)["blk.0.attn_output.weight"] == kind


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "inputs": (
        config(integer("int8"))
        | {
            "global_quant_config": {
                "weight": integer("int8"),
                "input_tensors": integer("int8", **TENSOR),
                "target_device": "CPU",
            }
        },
        {},
        r"input of LlamaForCausalLM::.* is quantized at run time, and a \.gguf has "
        r"only weights",
        "llama.cpp rounds inputs to int8 by itself",
    ),
    "fp8": (
        config({"dtype": "fp8_e4m3", **CHANNEL}),
        {},
        "weights of .* is fp8_e4m3",
        "gguf_q8_0",
    ),
    "8 bits and a zero point": (
        config(integer("uint8", symmetric=False)),
        {},
        "has 8 bits and a zero point, and blocks with a minimum 4 or 5",
        "quantizer init --preset gguf_q4_1",
    ),
    "16 bits": (
        config(integer("int16", **CHANNEL)),
        {},
        "has 16 bits, and blocks 4, 5 or 8",
        "8 bits or less",
    ),
    "groups of 16": (
        config(integer("int4", **GROUP | {"group_size": 16})),
        {},
        "has groups of 16, and blocks 32 inputs",
        "set its group_size to 32",
    ),
    "a scale for each input": (
        config(integer("int8", **CHANNEL | {"ch_axis": 1})),
        {},
        "for each input",
        "ch_axis",
    ),
    "rows that blocks do not divide": (
        config(integer("int8", **CHANNEL)),
        {"intermediate_size": 80},
        "weights of .*down_proj.* has 80 inputs, and blocks 32 each",
        "exclude the layer",
    ),
    "a tied head alone": (
        config(integer("int8"), exclude=["kind:embedding"]),
        {"tie_word_embeddings": True},
        r"weights of .*lm_head.* is the weight of .*embed_tokens.*, too",
        "kind:head and kind:embedding",
    ),
    "nothing": (
        config(integer("int8"), exclude=["*"]),
        {},
        "finds no quantized weight",
        "gguf_q4_0",
    ),
    "scaled rotations": (
        preset("gguf_q8_0"),
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
        "has rotations of the type yarn",
        "gguf_template",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_blocks_cannot_hold_is_refused_with_what_they_can(
    name: str, tmp_path: Path
) -> None:
    given, settings, why, remedy = REFUSED[name]
    with pytest.raises(UsageError, match=why) as refused:
        calibrated(given, llama(**settings)).export("gguf", tmp_path / "net.gguf")
    assert remedy in str(refused.value.help)
    assert not list(tmp_path.iterdir())


def test_a_template_of_another_model_is_refused(tmp_path: Path) -> None:
    result = calibrated(preset("gguf_q8_0"))
    other = llama()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.copy_(torch.randn(96, 64))
    (tmp_path / "broken.gguf").write_bytes(b"no such file")
    template(tmp_path / "tied.gguf", llama(tie_word_embeddings=True))
    template(tmp_path / "other.gguf", other)
    template(tmp_path / "wide.gguf", llama(vocab_size=96))
    for name, why in {
        "missing": "cannot be read as GGUF",
        "broken": "cannot be read as GGUF",
        "tied": "has no tensor for lm_head.weight",
        "other": "other.gguf: model.layers.0.mlp.up_proj.weight is not the model's",
        "wide": r"has the shape \[96, 64\], in the model \[64, 64\]",
    }.items():
        with pytest.raises(UsageError, match=why) as refused:
            result.export(
                "gguf", tmp_path / "net.gguf", gguf_template=tmp_path / f"{name}.gguf"
            )
        assert "of exactly this model" in str(refused.value.help)
    assert not (tmp_path / "net.gguf").exists()


def test_models_that_are_not_known_are_refused(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(32, 8))
    result = quantizer.calibrate(plain, config(integer("int8")), [torch.ones(2, 32)])
    with pytest.raises(UsageError, match="this model has no embedding of tokens") as refused:
        result.export("gguf", tmp_path / "net.gguf")
    assert 'target="onnx"' in str(refused.value.help)
    embedded = torch.nn.Sequential(torch.nn.Embedding(4, 32), torch.nn.Linear(32, 8))
    tokens = [torch.zeros(2, 3, dtype=torch.long)]
    result = quantizer.calibrate(embedded, config(integer("int8")), tokens)
    with pytest.raises(UsageError, match="a Sequential without a config of transformers"):
        result.export("gguf", tmp_path / "net.gguf")
    assert not list(tmp_path.iterdir())


def test_where_transformers_knows_no_architecture_the_tensors_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise ValueError("GGUF model with architecture llama is not supported yet.")

    model = llama()
    base, result = (
        template(tmp_path / "base.gguf", model),
        calibrated(preset("gguf_q4_1"), model),
    )
    monkeypatch.setattr("quantizer.export.gguf.exporter.read_checkpoint", refuse)
    found = result.export("gguf", tmp_path / "net.gguf", gguf_template=base)
    assert (found.compared, found.max_difference) == ("tensors", 0.0)
    assert "is not supported yet; its tensors were compared instead" in found.remarks[-1]
    with pytest.raises(
        VerificationError, match="cannot run it: ValueError: GGUF model with architecture llama"
    ):
        result.export("gguf", tmp_path / "other.gguf")


def test_a_file_that_cannot_be_written_is_an_error_about_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot write"):
        calibrated(preset("gguf_q8_0")).export("gguf", tmp_path / "file" / "net.gguf")


def test_from_init_to_a_file_on_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test mode with --to gguf measures the file's scales."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    template(tmp_path / "base.gguf", llama())
    run = ["--model", "net.py", "-q"]
    assert run_command(["init", "--strategy", "gguf_q5_1", "-o", "q5.json"]) == 0
    assert (
        run_command(["plan", "--config_file", "q5.json", "--model", "net.py", "--for", "gguf"])
        == 0
    )
    assert "--to gguf can express all tensors" in capsys.readouterr().out
    assert run_command(["--quant_mode", "calib", "--config_file", "q5.json", *run]) == 0
    figures = []
    for more in ([], ["--deploy", "gguf", "--gguf_template", "base.gguf"]):
        assert run_command(["--quant_mode", "test", *run, *more]) == 0
        figures.append(
            json.loads((tmp_path / "quantize_result" / "report.json").read_text())["metrics"][
                "sqnr_db"
            ]
        )
    assert figures[0] != figures[1]
    assert figures[0] == pytest.approx(figures[1], abs=0.3)
    said = capsys.readouterr().out
    assert "LlamaForCausalLM.gguf" in said
    assert "outputs differ by at most 0, 100.00% are equal" in said
    assert run_command(["--quant_mode", "test", *run, "--gguf_template", "base.gguf"]) == 2
    assert "--gguf_template is only for --to gguf" in capsys.readouterr().err
