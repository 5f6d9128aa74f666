"""Mixtures of experts in files: each expert's layers by the names that engines know, or a
refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.extended import extended
from support.moe import EXPERTS, IDS, calls, mixture
from torch import Tensor, nn

import quantizer
from quantizer import ModelQuantizer
from quantizer.config.diagnostics import ConfigError
from quantizer.errors import UsageError
from quantizer.export.targets import EXPORTERS

pytestmark = pytest.mark.slow

TARGET = "compressed-tensors"
for package in (*EXPORTERS[TARGET].needs, *EXPORTERS["gguf"].needs):
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
import gguf

INT4 = {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 16}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
MXFP4 = {"dtype": "mx", "mx_element_dtype": "fp4", "qscheme": "per_group", "ch_axis": 1}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
BLOCKS = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [16, 16]}
FLOAT = ["kind:embedding", "kind:head", "re:.*Router.*"]
WEIGHTS = {"groups": INT4, "channels": INT8, "tensors": FP8}
NAMES = {
    "Mixtral": ("model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3Moe": ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
}


def config(weight: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "global_quant_config": {"weight": weight, **more.pop("inputs", {})},
        "exclude": FLOAT,
        **more,
    }


def result(family: str, settings: dict[str, Any]) -> Any:
    if family == "Wide":
        sizes = {"hidden_size": 256, "moe_intermediate_size": 512}
        model = mixture("Qwen3Moe", num_hidden_layers=1, **sizes)
    elif family == "GptOss":
        model = mixture("GptOss", num_hidden_layers=1)
    else:
        model = mixture(family)
    return quantizer.calibrate(model, settings, calls(1))


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Mixtral", kind) for kind in WEIGHTS), *extended(("Qwen3Moe", "groups"))],
)
def test_transformers_reads_each_expert_bit_for_bit(
    family: str, kind: str, tmp_path: Path
) -> None:
    found = result(family, config(WEIGHTS[kind]))
    verified = found.export(TARGET, tmp_path / "made")
    assert verified.sqnr_db == float("inf") or verified.max_difference == 0
    stored = load_file(tmp_path / "made" / "model.safetensors")
    block, layers = NAMES[family]
    part = "weight" if kind == "tensors" else "weight_packed"
    named = {
        name
        for name in stored
        if name.startswith(f"{block}.experts.") and name.endswith(f".{part}")
    }
    assert named == {
        f"{block}.experts.{e}.{layer}.{part}" for e in range(EXPERTS) for layer in layers
    }
    assert not any("gate_up_proj" in name for name in stored)
    written = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in written["config_groups"].values()] == [["Linear"]]
    assert f"{block}.gate" in written["ignore"]


def test_groups_may_be_whole_rows_of_some_experts(tmp_path: Path) -> None:
    model = mixture("Qwen3Moe", moe_intermediate_size=64, num_hidden_layers=1)
    settings = config(INT4 | {"group_size": 32})
    found = quantizer.calibrate(model, settings, calls(1))
    assert found.export(TARGET, tmp_path / "made").max_difference == 0
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    groups = written["quantization_config"]["config_groups"].values()
    assert [group["weights"]["group_size"] for group in groups] == [32]


def test_experts_may_be_in_other_bits_than_the_rest(tmp_path: Path) -> None:
    settings = config(INT8, layer_quant_config={"*experts.*_proj": {"weight": INT4}})
    assert result("Qwen3Moe", settings).export(TARGET, tmp_path / "made").max_difference == 0
    groups = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]
    bits = {group["weights"]["num_bits"]: group["targets"] for group in groups.values()}
    assert bits[4] == [r"re:.*\.experts\.\d+\..*"]
    assert bits[8] == sorted(
        f"model.layers.{layer}.self_attn.{part}_proj"
        for layer in range(2)
        for part in (*"qkvo", "qkv")
    )


@pytest.mark.parametrize("left", ["*experts*", "model.layers.1.mlp.experts"])
def test_experts_in_float_keep_their_tensors(left: str, tmp_path: Path) -> None:
    """As transformers takes what it finds by the names of single experts for codes."""
    found = result("Mixtral", config(INT4) | {"exclude": [*FLOAT, left]})
    assert found.export(TARGET, tmp_path / "made").max_difference == 0
    stored = load_file(tmp_path / "made" / "model.safetensors")
    assert "model.layers.1.mlp.experts.down_proj" in stored
    assert ("model.layers.0.mlp.experts.down_proj" in stored) is (left == "*experts*")


def test_a_model_in_place_writes_the_same_file(tmp_path: Path) -> None:
    model = ModelQuantizer(config(INT4)).quantize_model(mixture("Qwen3Moe"))
    assert ModelQuantizer.export(model, tmp_path / "in_place", [IDS]).max_difference == 0
    result("Qwen3Moe", config(INT4)).export(TARGET, tmp_path / "traced")
    one, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("in_place", "traced")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        (
            "GptOss",
            config(INT4),
            r"each is \[experts, in, out\], which engines store in a layout of their own",
        ),
        (
            "Qwen3Moe",
            config(INT4 | {"dtype": "uint4", "symmetric": False}),
            "is asymmetric, and readers take no zero",
        ),
        ("Qwen3Moe", config(MXFP4), "is fp4, and readers load no experts of this format"),
        ("Qwen3Moe", config(BLOCKS), "has scales of blocks, and transformers loads no such"),
        (
            "Qwen3Moe",
            config(INT4, layer_quant_config={"*down_proj": {"weight": INT8}}),
            "is quantized otherwise than those of other experts",
        ),
        (
            "Qwen3Moe",
            config(
                INT8,
                inputs={
                    "input_tensors": {
                        "dtype": "int8",
                        "qscheme": "per_token",
                        "is_dynamic": True,
                    }
                },
            ),
            "is of experts, whose inputs readers leave in float",
        ),
        (
            "Wide",
            config(INT4 | {"group_size": 256}) | {"exclude": [*FLOAT, "*o_proj"]},
            "have groups in some layers and whole rows in others",
        ),
    ],
)
def test_what_checkpoints_cannot_hold_is_told(
    family: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why):
        result(family, settings).export(TARGET, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_experts_share_no_blocks() -> None:
    with pytest.raises(ConfigError, match="blocks of 64 rows would have experts share scales"):
        result("Mixtral", config(BLOCKS | {"block_size": [64, 64]}))


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_blocks_of_llama_cpp_hold_the_experts(family: str, tmp_path: Path) -> None:
    """transformers reads files of one of both."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    if family == "Qwen3Moe":
        sizes |= {"norm_topk_prob": True, "moe_intermediate_size": 64}
    settings = config({"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 32})
    calibrated = quantizer.calibrate(mixture(family, **sizes), settings, calls(1))
    verified = calibrated.export("gguf", tmp_path / "made.gguf")
    assert verified.compared == ("outputs" if family == "Qwen3Moe" else "tensors")
    assert verified.max_difference == 0
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
    for layer in ("gate", "up", "down"):
        stack = stored[f"blk.0.ffn_{layer}_exps.weight"]
        assert (stack.tensor_type.name, int(stack.shape[2])) == ("Q4_0", EXPERTS)


class Picking(nn.Module):
    """Each row of its input has an expert, which its largest value says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.head = nn.Parameter(torch.randn(EXPERTS, 16, 32)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(
            torch.bmm(self.weight[x[:, :EXPERTS].argmax(-1)], x.unsqueeze(-1)).squeeze(-1)
        )
        return out


@pytest.mark.parametrize("kind", ["groups", "tensors"])
def test_programs_compute_what_test_mode_does(kind: str, tmp_path: Path) -> None:
    weight = {"groups": INT4, "tensors": {"dtype": "int8", "qscheme": "per_tensor"}}[kind]
    found = quantizer.calibrate(
        Picking().eval(), {"global_quant_config": {"weight": weight}}, [torch.randn(8, 32)]
    )
    assert found.export("pt2", tmp_path / "made.pt2").max_difference < 1e-5
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    assert found.export("onnx", tmp_path / "made.onnx").max_difference < 1e-5
