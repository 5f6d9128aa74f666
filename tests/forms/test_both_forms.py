"""What both file forms can say is one plan and, byte for byte, one quant_info.json, whichever
form says it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.configs import config, document, layer
from support.runs import calibrate, check
from support.toys import traced

from quantizer.graph.passes import run_passes
from quantizer.plan.resolve import resolve_plan

TENSOR: dict[str, Any] = {
    "dtype": "int8",
    "is_dynamic": False,
    "observer_cls": "PerTensorMinMaxObserver",
    "qscheme": "per_tensor",
    "symmetric": True,
    "round_method": "half_even",
    "scale_type": "float",
}
CHANNEL: dict[str, Any] = TENSOR | {
    "observer_cls": "PerChannelMinMaxObserver",
    "qscheme": "per_channel",
    "ch_axis": 0,
}
PER_CHANNEL: dict[str, Any] = {"weights": {"per_channel": True}}
Pair = tuple[dict[str, Any], dict[str, Any]]


def layered(*layers: dict[str, Any], roles: list[str], **more: Any) -> dict[str, Any]:
    return document(*layers, quantizable_data_type=roles, **more)


def hierarchical(everywhere: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"global_quant_config": everywhere | {"target_device": "CPU"}, **more}


def pairs(name: str) -> dict[str, Pair]:
    """Files of both forms that say the same; `name` is a layer's."""
    return {
        "weights": (layered(roles=["weights"]), hierarchical({"weight": TENSOR})),
        "weights per channel, and biases": (
            layered(roles=["weights", "bias"], tensor=PER_CHANNEL),
            hierarchical({"weight": CHANNEL, "bias": TENSOR}),
        ),
        "inputs of a type": (
            layered(layer(type="Linear", roles=["weights", "input"]), roles=["weights"]),
            hierarchical(
                {"weight": TENSOR},
                layer_type_quant_config={"Linear": {"input_tensors": TENSOR}},
            ),
        ),
        "other widths by type and by name": (
            layered(
                layer(
                    type="Conv2d", roles=["weights"], bit_width=4, symmetric_scale="half_range"
                ),
                layer(
                    name,
                    roles=["weights", "bias"],
                    tensor={"weights": {"bit_width": 16, "symmetric_scale": "quant_max"}},
                ),
                roles=["weights"],
            ),
            hierarchical(
                {"weight": TENSOR},
                layer_type_quant_config={"Conv2d": {"weight": TENSOR | {"dtype": "int4"}}},
                layer_quant_config={name: {"weight": {"dtype": "int16"}, "bias": TENSOR}},
            ),
        ),
        "a layer in float": (
            layered(layer(name, roles=[]), roles=["weights"]),
            hierarchical({"weight": TENSOR}, exclude=[name]),
        ),
        "asymmetric weights, powers of two": (
            layered(
                roles=["weights", "bias"],
                tensor={
                    "weights": {"symmetry": False, "signed": False},
                    "bias": {"scale_type": "poweroftwo"},
                },
            ),
            hierarchical(
                {
                    "weight": TENSOR | {"symmetric": False},
                    "bias": TENSOR | {"scale_type": "pof2"},
                }
            ),
        ),
        "equalized": (
            layered(roles=["weights"], include_cle=True),
            hierarchical(
                {"weight": TENSOR}, pre_quant_opt_config=[{"name": "cle", "cle_steps": -1}]
            ),
        ),
        "unsigned activations, which a ReLU makes": (
            layered(layer(type="relu", roles=["activation"], signed=False), roles=["weights"]),
            hierarchical(
                {"weight": TENSOR},
                layer_type_quant_config={
                    "relu": {"output_tensors": TENSOR | {"dtype": "uint8"}}
                },
            ),
        ),
        "another rounding and method": (
            layered(
                roles=["weights"],
                tensor={"weights": {"round_mode": "std_round", "method": "mse"}},
            ),
            hierarchical(
                {
                    "weight": TENSOR
                    | {"round_method": "round", "observer_cls": "PerTensorMSEObserver"}
                }
            ),
        ),
    }


KINDS = tuple(pairs(""))


def write(folder: Path, files: Pair) -> list[Path]:
    paths = [folder / "layered.json", folder / "hierarchical.json"]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content, indent=2))
    return paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("toy", "name"), [("residual", "layer1.0.conv2"), ("mobile", "se")])
def test_both_forms_make_one_plan(toy: str, name: str, kind: str, tmp_path: Path) -> None:
    graph = traced(toy)
    plans = []
    for content in pairs(name)[kind]:
        read = config(tmp_path, content)
        plans.append(resolve_plan(read, run_passes(graph, read.settings), graph))
    one, other = (
        {key: tensor.decided() for key, tensor in plan.tensors.items()} for plan in plans
    )
    assert one and one == other
    assert plans[0].needs_data == plans[1].needs_data


RESIDUAL = """
import torch
from support.toys import Residual, shake

def model():
    torch.manual_seed(0)
    return shake(Residual())

def calibration_data():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=draw) for _ in range(2)]
"""


@pytest.fixture
def residual(tmp_path: Path) -> str:
    (tmp_path / "residual.py").write_text(RESIDUAL)
    return str(tmp_path / "residual.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_leave_equal_results(kind: str, residual: str, tmp_path: Path) -> None:
    files = {}
    for path in write(tmp_path, pairs("layer1.0.conv1")[kind]):
        out = tmp_path / path.stem
        assert calibrate(out, model=residual, config=str(path)) == 0
        files[path.stem] = {
            file.name: file.read_bytes()
            for file in out.iterdir()
            if file.name not in ABOUT_THE_RUN
        }
    assert files["layered"].keys() == files["hierarchical"].keys()
    for name, content in files["layered"].items():
        assert (content == files["hierarchical"][name]) or name in ABOUT_THE_FILE, name


ABOUT_THE_FILE = (
    "plan.json",
    "config.resolved.json",
    "checksums.json",
    "report.html",
    "report.json",
)
ABOUT_THE_RUN = ("run.json", "run.log", ".quantizer.json")


def test_results_of_one_form_are_tested_with_the_file_of_the_other(
    residual: str, tmp_path: Path
) -> None:
    one, other = write(tmp_path, pairs("layer1.0.conv1")["weights"])
    assert calibrate(tmp_path / "out", model=residual, config=str(one)) == 0
    assert check(tmp_path / "out", "--config_file", str(other), model=residual) == 0
    different = write(tmp_path, pairs("layer1.0.conv1")["a layer in float"])[1]
    assert check(tmp_path / "out", "--config_file", str(different), model=residual) == 5


def test_both_forms_run_the_same_algorithms(tmp_path: Path) -> None:
    """`algorithms` of one form is both lists of the other, one after the other."""
    model = tmp_path / "net.py"
    model.write_text(BLOCKS)
    first, others = (
        {"name": "smoothquant", "alpha": 0.5},
        [{"name": "awq"}, {"name": "gptq", "damp_percent": 0.05}],
    )
    files = (
        layered(roles=["weights"], tensor=PER_CHANNEL, algorithms=[first, *others]),
        hierarchical({"weight": CHANNEL}, pre_quant_opt_config=first, algo_config=others),
    )
    found = []
    for path in write(tmp_path, files):
        assert calibrate(tmp_path / path.stem, model=str(model), config=str(path)) == 0
        written = {file.name: file.read_bytes() for file in (tmp_path / path.stem).iterdir()}
        found.append(
            {
                name: content
                for name, content in written.items()
                if name not in ABOUT_THE_RUN + ABOUT_THE_FILE
            }
        )
    assert {"quant_info.json", "algorithms.json", "weights.safetensors"} <= found[0].keys()
    assert found[0] == found[1]


BLOCKS = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return nn.Sequential(block(), block(), nn.Linear(16, 4))

def calibration_data():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(16, 16, generator=draw) @ torch.randn(16, 16, generator=draw) for _ in range(3)]
"""
