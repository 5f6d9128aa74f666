"""Parts of a join keep their bits behind what is computed of them before a layer multiplies
it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.extended import extended, extended_except
from support.generated import imported
from support.onnx_files import quick_files  # noqa: F401 - a fixture
from test_joins import (
    CPU,
    HIERARCHICAL,
    IMAGE,
    INT8,
    SYMMETRIC,
    Body,
    Detector,
    decibels,
    images,
    joined,
    rows,
    worst,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import quantizer
from quantizer.cli.main import run_command

FACTORS = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 0.5, 2.0]).view(1, 7, 1, 1)


def bent_by_hand(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    y = joined(b, s)
    return net.mix(y * y.sigmoid())


def also_returned(net: Detector, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = joined(b, s) * 1.5
    return y, net.mix(y)


def also_added(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    y = joined(b, s) * 1.5
    return net.mix(y).mean() + y


def for_two_layers(net: Detector, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = joined(b, s) * 1.5
    return net.mix(y), net.linear(y.flatten(2).mT)


COMPUTED: dict[str, Body] = {
    "times a number": lambda net, b, s: net.mix(joined(b, s) * 1.5),
    "divided": lambda net, b, s: net.mix(joined(b, s) / 2),
    "times constants": lambda net, b, s: net.mix(joined(b, s) * FACTORS),
    "times a value": lambda net, b, s: net.mix(joined(b, s) * s.mean(1, keepdim=True)),
    "plus another join": lambda net, b, s: net.mix(joined(b, s) + joined(2 * b, s * s)),
    "subtracted from 1": lambda net, b, s: net.mix(1 - joined(b, s)),
    "cut off": lambda net, b, s: net.mix(F.hardtanh(joined(b, s), 0, 500)),
    "cut off, plus a number": lambda net, b, s: net.mix(F.hardtanh(joined(b, s), 0, 500) + 1),
    "leaky": lambda net, b, s: net.mix(F.leaky_relu(joined(b, s))),
    "prelu": lambda net, b, s: net.mix(F.prelu(joined(b, s), torch.tensor(0.2))),
    "bent, in a linear layer": lambda net, b, s: net.linear(F.gelu(rows(b, s))),
    "bent, then moved": lambda net, b, s: net.linear(
        F.gelu(joined(b, s)).flatten(2).transpose(1, 2)
    ),
    "bent by hand": bent_by_hand,
    "roots": lambda net, b, s: net.mix(joined(b, s).sqrt()),
    "mean of windows": lambda net, b, s: net.mix(F.avg_pool2d(joined(b, s), 2)),
    "mean": lambda net, b, s: net.linear(joined(b, s).mean((2, 3))),
    "largest of windows": lambda net, b, s: net.mix(F.max_pool2d(joined(b, s), 2)),
    "upsampled": lambda net, b, s: net.mix(F.interpolate(joined(b, s), scale_factor=2)),
    "upsampled smoothly": lambda net, b, s: net.mix(
        F.interpolate(joined(b, s), scale_factor=2, mode="bilinear")
    ),
    "zeros around": lambda net, b, s: net.mix(F.pad(joined(b, s), (1, 1, 1, 1))),
    "step by step": lambda net, b, s: net.mix(F.relu(joined(b, s) * 1.5 - 0.1) * 2),
    "normalized": lambda net, b, s: net.norm(joined(b, s) * 1.5),
    "also returned": also_returned,
    "also added": also_added,
    "for two layers": for_two_layers,
}
CHOSEN = [
    "times a number",
    "cut off",
    "bent, then moved",
    "mean of windows",
    "largest of windows",
    "step by step",
]


USUAL = (
    "times a number",
    "times constants",
    "plus another join",
    "cut off, plus a number",
    "leaky",
    "prelu",
    "bent, then moved",
    "mean",
    "largest of windows",
    "zeros around",
    "step by step",
    "normalized",
    "also returned",
    "for two layers",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(COMPUTED, *USUAL))
def test_parts_keep_their_bits_behind_what_is_computed_of_them(name: str) -> None:
    assert worst(COMPUTED[name]) > 38


@pytest.mark.parametrize("name", extended_except(CHOSEN, "cut off", "bent, then moved"))
@pytest.mark.parametrize("config", [SYMMETRIC, HIERARCHICAL], ids=["symmetric", "hierarchical"])
def test_so_they_do_with_other_configs(name: str, config: dict[str, Any]) -> None:
    assert worst(COMPUTED[name], config) > 33


@pytest.mark.parametrize("method", ["percentile", "mse", "entropy"])
def test_so_they_do_with_other_ways_to_find_ranges(method: str) -> None:
    settings = {"method": method, "symmetry": True}
    config = document(
        tensor={"activation": settings, "input": settings}, overall={"per_channel": True}
    )
    assert worst(COMPUTED["times a number"], config) > 25


def test_only_inputs_of_layers_are_quantized() -> None:
    wanted = {"weight": HIERARCHICAL["global_quant_config"]["weight"], "input_tensors": INT8}
    assert worst(COMPUTED["times a number"], {"global_quant_config": wanted}) > 33


@pytest.mark.parametrize("name", extended_except(CHOSEN, "bent, then moved", "step by step"))
def test_the_folder_and_the_generated_network_compute_the_same(
    name: str, tmp_path: Path
) -> None:
    model, (image, _) = Detector(COMPUTED[name]).eval(), images(2)
    result = quantizer.calibrate(model, CPU, images(1))
    result.save(tmp_path)
    header = json.loads((tmp_path / "quant_info.json").read_text())["header"]
    assert [entry["scale"] for entry in header["joins"].values()] == ["scaled"]
    (file,) = tmp_path.glob("*.py")
    again = quantizer.load(tmp_path, model)
    assert torch.equal(imported(file)(image), result.network(image))
    assert torch.equal(again.network(image), result.network(image))
    assert {*again.plan.plan.tensors} == {*result.plan.plan.tensors}


class Beside(nn.Module):
    """Detectors that look at the boxes and scores of the first, so that a file of all is
    written once.
    """

    def __init__(self, bodies: list[Body]) -> None:
        super().__init__()
        self.detectors = nn.ModuleList(Detector(body) for body in bodies)

    def forward(self, image: Tensor) -> list[Any]:
        b, s = self.detectors[0].parts(image)
        return [detector.body(detector, b, s) for detector in self.detectors]


IN_FILES = [
    ["bent, then moved", "largest of windows", "step by step", "for two layers"],
    *extended(["times a number", "cut off", "mean of windows", "leaky", "for two layers"]),
]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_files")
@pytest.mark.parametrize("names", IN_FILES, ids=["some", "others"])
def test_files_compute_what_test_mode_does(names: list[str], tmp_path: Path) -> None:
    for module in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(module, reason="the ONNX target needs it (extra: onnx)")
    model = Beside([COMPUTED[name] for name in names]).eval()
    result = quantizer.calibrate(model, CPU, images(1))
    result.save(tmp_path / "results")
    header = json.loads((tmp_path / "results" / "quant_info.json").read_text())["header"]
    assert {entry["scale"] for entry in header["joins"].values()} == {"scaled"}
    verification = result.export("onnx", tmp_path / "net.onnx")
    assert verification.default_session is not None
    assert verification.default_session.first_differing is None
    assert all(part.equal > 0.999 * part.count for part in verification.parts)
    found = result.export("pt2", tmp_path / "net.pt2")
    assert len(found.parts) == len(names) + 1, "one of the networks has two outputs"
    assert all(part.equal > 0.999 * part.count for part in found.parts)


def test_parts_of_about_one_range_share_a_scale_and_are_retuned(tmp_path: Path) -> None:
    model = Detector(lambda net, b, s: net.mix(joined(b / IMAGE, s) * 1.5)).eval()
    for name, statistic in (("before", "max"), ("wanted", "mean")):
        activations = {
            role: {"calib_statistic_method": statistic} for role in ("input", "activation")
        }
        config = document(tensor=activations, overall={"per_channel": True})
        quantizer.calibrate(model, config, images(1)).save(tmp_path / name)
    words = ["--statistic", "mean", "--output_dir", str(tmp_path / "after")]
    assert run_command(["retune", str(tmp_path / "before"), *words]) == 0
    after, wanted = (
        json.loads((tmp_path / name / "quant_info.json").read_text())
        for name in ("after", "wanted")
    )
    (entry,) = after["header"]["joins"].values()
    assert entry["scale"] == "one"
    assert {name.rpartition("/")[2] for name in entry["lost_bits"]} == {
        "mul.1[0:4]",
        "mul.1[4:7]",
    }
    assert after["header"]["joins"] == wanted["header"]["joins"]
    assert after["tensors"] == wanted["tensors"]
    plan = json.loads((tmp_path / "before" / "plan.json").read_text())
    sources: set[str] = set()
    for row in plan["layers"]:
        for tensor in row.get("left_by_joins", {}).values():
            sources.add(tensor["source"].rpartition("/")[2])
    assert sources == {"mul.1[:, 0:4]", "mul.1[:, 4:7]"}, "the channels of each part"


def test_what_is_computed_of_parts_and_returned_stays_float() -> None:
    assert worst(lambda net, b, s: joined(b, s) * 1.5 + 0.5) > 40


def by_entry(roles: list[str], name: str, **words: Any) -> dict[str, Any]:
    overall = dict(document()["overall_quantize_config"]) | {"per_channel": False} | words
    entry = {
        "layer_type": None,
        "layer_name": name,
        "quantizable_data_type": roles,
        "overall_quantize_config": overall,
    }
    return copy.deepcopy(CPU) | {"layer_quantize_config": [entry]}


BY_CHANNEL = INT8 | {"qscheme": "per_channel", "ch_axis": 1}
MIXED: dict[str, dict[str, Any]] = {
    "fewer bits for parts": by_entry(["activation"], "re:.*/(cat|sigmoid.*|mul)", bit_width=4),
    "channels": {
        "global_quant_config": HIERARCHICAL["global_quant_config"]
        | {"input_tensors": BY_CHANNEL, "output_tensors": BY_CHANNEL}
    },
}


def twice_read(net: Detector, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    y = joined(b, s)
    return net.mix(y), net.mix(y * 1.5)


@pytest.mark.parametrize(
    "body", [lambda net, b, s: net.mix(joined(b, s)), twice_read], ids=["one", "two"]
)
@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED)
def test_parts_that_were_observed_otherwise_than_the_whole_keep_their_own_scales(
    body: Body, config: dict[str, Any], tmp_path: Path
) -> None:
    model = Detector(body).eval()
    result = quantizer.calibrate(model, config, images(1))
    result.save(tmp_path)
    (image, _) = images(2)
    read = pytree.tree_leaves(quantizer.load(tmp_path, model).network(image))
    for x, y in zip(read, pytree.tree_leaves(result.network(image)), strict=True):
        assert torch.equal(x, y)


class Half(nn.Module):
    """A network of halves, for which a factor of 2^18 is infinite, and zero times it no
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Conv2d(7, 8, 1)
        with torch.no_grad():
            self.mix.weight[:, 4:] *= 30

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([x[:, :4].sigmoid() * 640, x[:, 4:].relu() * 2e-3], 1))  # type: ignore[no-any-return]


def test_factors_fit_the_networks_format() -> None:
    model = Half().half().eval()
    x = torch.randn(2, 7, 8, 8, generator=torch.Generator().manual_seed(0)).half()
    result = quantizer.calibrate(model, CPU, [x])
    with torch.no_grad():
        assert decibels(model(x).float(), result.network(x).float()) > 30
