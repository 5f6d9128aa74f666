"""Checkpoints in the form of GPTQ: the layout of AutoGPTQ, the settings that engines read, and
what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.llamas import llama, tokens
from torch import Tensor

import quantizer
from quantizer.errors import UsageError
from quantizer.export.targets import EXPORTERS
from quantizer.sources.hugging_face.loader import load_hugging_face

pytestmark = pytest.mark.slow

TARGET = "gptq"
for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

Spec = dict[str, Any]
DOWN = "model.layers.0.mlp.down_proj"
GROUPS: Spec = {"qscheme": "per_group", "ch_axis": 1, "group_size": 32}
INT4 = GROUPS | {"dtype": "int4"}
INT8: Spec = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}


def config(weight: Spec, **more: Any) -> Spec:
    float_layers = ["kind:embedding", "kind:head"]
    return {"global_quant_config": {"weight": weight}, "exclude": float_layers} | more


def exported(content: Spec, folder: Path, model: Any = None) -> Any:
    return quantizer.calibrate(model or llama(), content, tokens()).export(TARGET, folder)


def settings(folder: Path) -> Spec:
    found: Spec = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert json.loads((folder / "quantize_config.json").read_text()) == found
    return found


def codes_of(words: Tensor, bits: int) -> Tensor:
    """The codes that AutoGPTQ unpacks along the first axis: `forward` of qlinear_cuda.py, for
    widths that divide 32.
    """
    shifts = torch.arange(0, 32, bits)
    return (words[:, None, :] >> shifts[None, :, None] & (1 << bits) - 1).flatten(0, 1)


def dequantized(parts: dict[str, Tensor], bits: int) -> Tensor:
    """The weight [outputs, inputs] by AutoGPTQ's formula, with zero points plus one."""
    codes = codes_of(parts["qweight"], bits)
    zeros = codes_of(parts["qzeros"].t(), bits).t() + 1
    groups = parts["g_idx"].long()
    return (parts["scales"][groups] * (codes - zeros[groups])).t()


def parts_of(folder: Path, path: str) -> dict[str, Tensor]:
    stored = load_file(folder / "model.safetensors")
    prefix = f"{path}."
    return {
        name.removeprefix(prefix): value
        for name, value in stored.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (INT4, {"bits": 4, "group_size": 32, "sym": True}),
        (INT8, {"bits": 8, "group_size": -1, "sym": True}),
        (GROUPS | {"dtype": "uint4"}, {"bits": 4, "group_size": 32, "sym": False}),
    ],
    ids=["int4", "int8", "asymmetric"],
)
def test_the_layout_is_that_of_autogptq(weight: Spec, words: Spec, tmp_path: Path) -> None:
    model = llama()
    result = quantizer.calibrate(model, config(weight), tokens())
    found = result.export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    expected = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    assert settings(tmp_path / "out") == expected | words
    bits, parts = words["bits"], parts_of(tmp_path / "out", DOWN)
    outputs, inputs = model.get_parameter(f"{DOWN}.weight").shape
    groups = 1 if words["group_size"] < 0 else inputs // 32
    assert {name: (value.dtype, tuple(value.shape)) for name, value in parts.items()} == {
        "qweight": (torch.int32, (inputs * bits // 32, outputs)),
        "qzeros": (torch.int32, (groups, outputs * bits // 32)),
        "scales": (torch.float32, (groups, outputs)),
        "g_idx": (torch.int32, (inputs,)),
    }
    values = dequantized(parts, bits)
    read = load_hugging_face(tmp_path / "out").get_parameter(f"{DOWN}.weight")
    assert torch.equal(read, values)
    step = parts["scales"].max()
    difference = values - model.get_parameter(f"{DOWN}.weight")
    assert 0 < difference.abs().max() < step


def test_scales_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    found = exported(config(INT4), tmp_path / "out", llama().bfloat16())
    # Test mode computes with the scales of the file; sums in bfloat16 differ in order
    assert found.sqnr_db is not None and found.sqnr_db > 50
    assert any("rounded to the model's dtype" in remark for remark in found.remarks)
    assert parts_of(tmp_path / "out", DOWN)["scales"].dtype == torch.bfloat16


def test_layers_in_float_are_patterns_and_a_head_is_a_switch(tmp_path: Path) -> None:
    content = config(INT4) | {"exclude": ["kind:embedding", "*.o_proj"]}
    assert exported(content, tmp_path / "out").max_difference == 0.0
    found = settings(tmp_path / "out")
    assert found["dynamic"] == {r"-:^model\.layers\.0\.self_attn\.o_proj$": {}}
    assert found["lm_head"] is True
    assert "qweight" in parts_of(tmp_path / "out", "lm_head")
    assert "weight" in parts_of(tmp_path / "out", "model.layers.0.self_attn.o_proj")


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    exported(config(INT4), tmp_path / "out")
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    exported(config(INT4), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first
    other = json.loads((tmp_path / "out" / "config.json").read_text())
    other["quantization_config"]["quant_method"] = "awq"
    (tmp_path / "out" / "config.json").write_text(json.dumps(other))
    with pytest.raises(UsageError, match=r"holds files that were changed: config\.json"):
        exported(config(INT4), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == other
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first


REFUSED: dict[str, tuple[Spec, Spec, str, str]] = {
    "inputs": (
        {"global_quant_config": {"weight": INT8, "input_tensors": {"dtype": "int8"}}},
        {},
        "have only weights",
        'target="compressed-tensors"',
    ),
    "another width": (
        config(GROUPS | {"dtype": "int5"}),
        {},
        "is int5, and the form has 2, 3, 4 or 8 bits",
        "int4",
    ),
    "floats": (config({"dtype": "fp8_e4m3"}), {}, "is fp8_e4m3, and the form", "int4"),
    "two schemes": (
        config(INT4, layer_quant_config={"*.down_proj": {"weight": INT8}}),
        {},
        "has other bits, groups or symmetry",
        "alike",
    ),
    "negative scales": (
        config(INT4 | {"symmetric_scale": "quant_min"}),
        {},
        "may have negative scales",
        "half_range",
    ),
    "words that are not full": (
        config(INT4 | {"group_size": -1}),
        {"intermediate_size": 100},
        "has 100 (outputs|inputs), which do not fill words of 32 bits",
        "exclude the layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_form_has_no_place_for_is_refused(name: str, tmp_path: Path) -> None:
    content, sizes, why, remedy = REFUSED[name]
    with pytest.raises(UsageError, match=why) as refused:
        exported(content, tmp_path / "out", llama(**sizes))
    assert remedy in str(refused.value.help)
    assert not list(tmp_path.iterdir())


def test_a_zero_point_of_zero_has_no_place(tmp_path: Path) -> None:
    """A group without negative values has the code 0 for the value 0."""
    model = llama()
    with torch.no_grad():
        model.get_parameter(f"{DOWN}.weight").abs_()
    with pytest.raises(UsageError, match="has a zero point of 0") as refused:
        exported(config(GROUPS | {"dtype": "uint4"}), tmp_path / "out", model)
    assert "symmetric to true" in str(refused.value.help)
    assert not list(tmp_path.iterdir())
