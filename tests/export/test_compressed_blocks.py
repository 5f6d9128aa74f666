"""FP8 weights in blocks with inputs in groups, as DeepSeek-V3 has them, and weights and inputs in
MX formats: what test mode computes, what a checkpoint holds and transformers loads, and what is
refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.llamas import llama, tokens
from torch import Tensor

import quantizer
from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    PerBlock2DMinMaxObserver,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)
from quantizer.api.config import read_config
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.export.compressed_tensors.placement import place_codes
from quantizer.export.targets import EXPORTERS
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.hugging_face.loader import load_hugging_face
from quantizer.sources.module_state import without_cache

pytestmark = pytest.mark.slow

TARGET = "compressed-tensors"
for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

Spec = dict[str, Any]
LARGEST = 448.0
DOWN = "model.layers.0.mlp.down_proj"
GROUPS: Spec = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 32,
    "is_dynamic": True,
}


def blocks(size: int) -> Spec:
    return {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [size, size]}


def config(weight: Spec, inputs: Spec | None = None) -> Spec:
    level = {"weight": weight} | ({"input_tensors": inputs} if inputs else {})
    return {"global_quant_config": level, "exclude": ["kind:embedding", "kind:head"]}


def deepseek(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Values and scales by the formula of DeepSeek-V3's weight_quant and weight_dequant: the
    scale of a block is its largest magnitude divided by 448.
    """
    rows, columns = (-(-length // size) for length in weight.shape)
    values, scales = torch.empty_like(weight), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * size, (row + 1) * size),
                slice(column * size, (column + 1) * size),
            )
            scale = weight[place].abs().max() / LARGEST
            scales[row, column] = scale
            codes = (weight[place] / scale).to(torch.float8_e4m3fn)
            values[place] = codes.float() * scale
    return values, scales


def written(folder: Path) -> Spec:
    found: Spec = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def test_transformers_computes_blocks_and_groups_of_inputs(tmp_path: Path) -> None:
    model = llama()
    result = quantizer.calibrate(model, config(blocks(32), GROUPS), tokens())
    found = result.export(TARGET, tmp_path / "out")
    # The reader finds ranges in float32, test mode in float64
    assert found.max_difference <= 1e-6
    [group] = written(tmp_path / "out")["config_groups"].values()
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    block = {"strategy": "block", "block_structure": [32, 32], "group_size": None}
    assert group == {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": fp8 | block | {"dynamic": False},
        "input_activations": fp8 | {"strategy": "group", "group_size": 32, "dynamic": True},
    }
    stored = load_file(tmp_path / "out" / "model.safetensors")
    values, scales = deepseek(model.get_parameter(f"{DOWN}.weight").detach(), 32)
    assert torch.equal(stored[f"{DOWN}.weight_scale"], scales)
    read = load_hugging_face(tmp_path / "out")
    assert torch.equal(read.get_parameter(f"{DOWN}.weight"), values), (
        "the reader of quantized folders gives the values back"
    )


def test_a_model_in_place_has_the_same_blocks(tmp_path: Path) -> None:
    """With the dataclasses, whose blocks are of 128 if they do not say."""
    fp8 = {"dtype": Dtype.fp8_e4m3}
    weight = QuantizationSpec(
        **fp8,
        qscheme=QSchemeType.per_block,
        observer_cls=PerBlock2DMinMaxObserver,
        block_size=[32, 32],
    )
    inputs = QuantizationSpec(
        **fp8, qscheme=QSchemeType.per_group, ch_axis=-1, group_size=32, is_dynamic=True
    )
    level = QuantizationConfig(weight=weight, input_tensors=inputs)
    settings = Config(level, exclude=["kind:embedding", "kind:head"])
    model = ModelQuantizer(settings).quantize_model(llama())
    found = ModelQuantizer.export(model, tmp_path / "out", tokens())
    assert found.max_difference <= 1e-6
    stored = load_file(tmp_path / "out" / "model.safetensors")
    _, scales = deepseek(llama().get_parameter(f"{DOWN}.weight").detach(), 32)
    assert torch.equal(stored[f"{DOWN}.weight_scale"], scales)
    read = Config.from_dict(settings.to_dict())
    assert read.global_quant_config.weight == weight
    usual = replace(weight, block_size=None)
    [rule] = read_config(Config(QuantizationConfig(weight=usual))).require().rules[1:]
    assert rule.fields["weights"]["group_size"].value == 128


def test_blocks_at_the_edges_are_smaller(tmp_path: Path) -> None:
    """[64, 96] in blocks of 64, and 32 rows of keys and values in one block."""
    model = llama()
    result = quantizer.calibrate(model, config(blocks(64)), tokens())
    found = result.export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    [remark] = [line for line in found.remarks if "end within a block" in line]
    assert all(part in remark for part in ("k_proj", "v_proj", "gate_proj", "vLLM and SGLang"))
    assert "q_proj" not in remark
    stored = load_file(tmp_path / "out" / "model.safetensors")
    values, scales = deepseek(model.get_parameter(f"{DOWN}.weight").detach(), 64)
    assert torch.equal(stored[f"{DOWN}.weight_scale"], scales)
    assert scales.shape == (1, 2)
    read = load_hugging_face(tmp_path / "out")
    assert torch.equal(read.get_parameter(f"{DOWN}.weight"), values)


MX: Spec = {"qscheme": "per_group", "group_size": 32}
MXFP8 = MX | {"dtype": "mx", "mx_element_dtype": "fp8_e4m3", "ch_axis": 1}
MXFP4 = MX | {"dtype": "mx", "mx_element_dtype": "fp4", "ch_axis": 1}
DYNAMIC: Spec = {"ch_axis": -1, "is_dynamic": True}
EVEN: Spec = {"scale_calculation_mode": "even"}
POWERS = GROUPS | {"scale_type": "pof2"}


@pytest.mark.parametrize(
    ("weight", "inputs", "layout"),
    [
        (MXFP8, POWERS, "mxfp8-quantized"),
        (MXFP4, MXFP4 | DYNAMIC | EVEN, "mxfp4-pack-quantized"),
    ],
    ids=["mxfp8", "mxfp4"],
)
def test_transformers_computes_inputs_in_mx_formats(
    weight: Spec, inputs: Spec, layout: str, tmp_path: Path
) -> None:
    result = quantizer.calibrate(llama().bfloat16(), config(weight, inputs), tokens())
    found = result.export(TARGET, tmp_path / "out")
    # Sums in bfloat16 differ in order, which moves inputs by a step
    assert found.sqnr_db is not None
    assert found.sqnr_db > result.test().metrics["sqnr_db"] + 10
    [group] = written(tmp_path / "out")["config_groups"].values()
    assert group["format"] == layout
    words = group["input_activations"]
    assert (words["strategy"], words["group_size"], words["dynamic"]) == ("group", 32, True)
    assert words["scale_dtype"] == "torch.uint8"


def test_mxfp8_weights_are_loaded_in_float32(tmp_path: Path) -> None:
    result = quantizer.calibrate(llama(), config(MXFP8), tokens())
    found = result.export(TARGET, tmp_path / "out")
    assert found.max_difference == 0.0
    assert any("computes mxfp8 in bfloat16" in remark for remark in found.remarks)
    weight = load_hugging_face(tmp_path / "out").get_parameter(f"{DOWN}.weight")
    assert weight.dtype == torch.float32


@pytest.fixture(scope="module")
def traced() -> Graph:
    model = llama()
    [batch] = tokens(1)
    with without_cache(model):
        return trace(model, (), batch)


REFUSED: dict[str, tuple[Spec, str, str]] = {
    "inputs that groups do not divide": (
        config(blocks(64), GROUPS | {"group_size": 64}),
        "has groups of 64 inputs, which do not divide its 96",
        "leave the input float",
    ),
    "groups of another length": (
        config(blocks(64), GROUPS),
        "meets a weight in blocks of 64, and engines then have dynamic groups of 64 inputs",
        "group_size 64",
    ),
    "tokens": (
        config(blocks(32), {"dtype": "fp8_e4m3", "qscheme": "per_token", "is_dynamic": True}),
        "meets a weight in blocks of 32",
        "set its qscheme to per_group",
    ),
    "groups without blocks": (
        config({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}, GROUPS),
        "engines have that with weights in blocks only",
        "per_token",
    ),
    "mxfp4 with floor": (
        config(MXFP4, MXFP4 | DYNAMIC),
        "finds its exponents in another way than readers",
        "scale_calculation_mode to even",
    ),
    "mxfp8 with shared exponents": (
        config(MXFP8, MXFP8 | DYNAMIC | EVEN),
        "which take the least power of two that clips nothing",
        '"scale_type": "pof2"',
    ),
    "mxfp4 with fp8": (
        config(MXFP4, GROUPS),
        "meets a weight in mxfp4, and readers then have dynamic groups of 32 inputs in fp4",
        "set its dtype to fp4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_reader_takes_is_known_before_calibration(name: str, traced: Graph) -> None:
    content, why, remedy = REFUSED[name]
    read = check_document(Document.of(content, "config")).require()
    plan = resolve_plan(read, traced, traced)
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    found = [row for row in place_codes(plan.graph, specs).refusals if row.role == "input"]
    assert found and all(why in row.why and remedy in row.help for row in found)
