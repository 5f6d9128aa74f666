"""Boxes in pixels and scores below 1, put into one tensor in all the ways that detectors have,
keep 8 bits each.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document, layer
from support.extended import extended, extended_except
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import quantizer
from quantizer.calibration.joins import decide_joins_again
from quantizer.cli.main import run_command
from quantizer.errors import ResultError
from quantizer.plan.joining.joins import decide_join
from quantizer.plan.model import JoinPlan

ROOT = Path(__file__).parents[2]
CPU = json.loads((ROOT / "configs" / "cpu_int8.json").read_text()) | {
    "include_bias_corr": False
}
SYMMETRIC = document(overall={"per_channel": True})
DPU = json.loads((ROOT / "configs" / "dpu.json").read_text())
INT8 = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}
HIERARCHICAL = {
    "global_quant_config": {
        "weight": {
            "dtype": "int8",
            "qscheme": "per_channel",
            "ch_axis": 0,
            "is_dynamic": False,
        },
        "input_tensors": INT8,
        "output_tensors": INT8,
    }
}
IMAGE = 640.0
CAT = "Detector::Detector/cat"

Body = Callable[["Detector", Tensor, Tensor], Any]


class Detector(nn.Module):
    """Four coordinates in pixels and three scores for each position; `body` puts them
    together.
    """

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)
        self.mix, self.linear = nn.Conv2d(7, 8, 3, 1, 1), nn.Linear(7, 5)
        self.norm = nn.BatchNorm2d(7)
        with torch.no_grad():
            self.mix.weight[:, :4] /= IMAGE
            self.linear.weight[:, :4] /= IMAGE
            self.norm.running_var[:4] *= 100 * IMAGE

    def forward(self, image: Tensor) -> Any:
        return self.body(self, *self.parts(image))

    def parts(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(image)
        return self.boxes(features).sigmoid() * IMAGE, self.scores(features).sigmoid()


def joined(b: Tensor, s: Tensor) -> Tensor:
    return torch.cat([b, s], 1)


def rows(b: Tensor, s: Tensor) -> Tensor:
    """[batch, positions, 7]"""
    return joined(b, s).flatten(2).transpose(1, 2)


def beside(b: Tensor, s: Tensor) -> Tensor:
    """The scores with room for the boxes."""
    return F.pad(s, (0, 0, 0, 0, 4, 0))


def filled(start: Callable[..., Tensor]) -> Body:
    def body(net: Detector, b: Tensor, s: Tensor) -> Tensor:
        y = start(b.shape[0], 7, *b.shape[2:])
        y[:, :4], y[:, 4:] = b, s
        return y

    return body


def scaled_in_place(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    y = rows(b / IMAGE, s)
    y[..., :4] *= IMAGE
    return y


def decoded_in_place(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    """As YOLOv5 has it."""
    y = rows(b / IMAGE, s).clone()
    y[..., 0:2] = (y[..., 0:2] * 2 - 0.5) * 100
    y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * 100
    return y


def channel_by_channel(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    y = joined(b / IMAGE, s).flatten(2)
    for channel in range(4):
        y.select(1, channel).mul_(IMAGE)
    return y


def written_by_index(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    y = beside(b, s)
    y[:, [0, 1, 2, 3]] = b
    return y


def scattered(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    index = torch.arange(4).view(1, 4, 1, 1).expand(b.shape[0], 4, *b.shape[2:])
    return beside(b, s).scatter(1, index, b)


def chosen(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    is_box = (torch.arange(7) < 4).view(1, 7, 1, 1)
    return torch.where(is_box, F.pad(b, (0, 0, 0, 0, 0, 3)), beside(b, s))


def corners(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    box, score = rows(b, s).split((4, 3), -1)
    return torch.cat(
        [box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2, score], -1
    )


RETURNED: dict[str, Body] = {
    "cat": lambda net, b, s: joined(b, s),
    "cat of rows": lambda net, b, s: torch.cat([b.flatten(2).mT, s.flatten(2).mT], -1),
    "hstack": lambda net, b, s: torch.hstack([b, s]),
    "stack": lambda net, b, s: torch.stack([b[:, :3], s], 1),
    "transposed": lambda net, b, s: rows(b, s),
    "nested": lambda net, b, s: torch.cat([joined(b, s), joined(s, b)], 1),
    "in a dict": lambda net, b, s: {"boxes and scores": rows(b, s), "scores": s},
    "in lists": lambda net, b, s: [joined(b, s), (joined(s, 2 * b),)],
    "cut off": lambda net, b, s: joined(b, s).clamp(0, IMAGE),
    "times a number": lambda net, b, s: joined(b, s) * 1.5,
    "times factors": lambda net, b, s: (
        joined(b / IMAGE, s) * torch.tensor([IMAGE] * 4 + [1.0] * 3).view(7, 1, 1)
    ),
    "pooled": lambda net, b, s: F.max_pool2d(joined(b, s), 2),
    "upsampled": lambda net, b, s: F.interpolate(joined(b, s), scale_factor=2),
    "empty, filled": filled(torch.empty),
    "zeros, filled": filled(torch.zeros),
    "overwritten": lambda net, b, s: joined(b, s).slice_scatter(s * s, 1, 4, 7),
    "scaled in place": scaled_in_place,
    "decoded in place": decoded_in_place,
    "channel by channel": channel_by_channel,
    "index_put": written_by_index,
    "index_copy": lambda net, b, s: beside(b, s).index_copy(1, torch.arange(4), b),
    "slice_scatter": lambda net, b, s: beside(b, s).slice_scatter(b, 1, 0, 4),
    "scatter": scattered,
    "where": chosen,
    "masked_fill": lambda net, b, s: joined(b, s).masked_fill(joined(b, s) < 1e-3, 0.0),
    "corners": corners,
    "beside its product": lambda net, b, s: (joined(b, s), net.mix(joined(b, s))),
}
USUAL = (
    "cat of rows",
    "stack",
    "nested",
    "cut off",
    "times factors",
    "pooled",
    "zeros, filled",
    "overwritten",
    "scaled in place",
    "index_put",
    "scatter",
    "where",
    "corners",
    "beside its product",
)
MULTIPLIED: dict[str, Body] = {
    "convolved": lambda net, b, s: net.mix(joined(b, s)),
    "in a linear layer": lambda net, b, s: net.linear(rows(b, s)),
    "rectified before": lambda net, b, s: net.linear(rows(b, s).relu()),
    "written in place before": lambda net, b, s: net.linear(scaled_in_place(net, b, s)),
    "and returned": lambda net, b, s: (joined(b, s)[:, 4:], net.mix(joined(b, s))),
    "twice": lambda net, b, s: (lambda y: net.mix(y) + net.mix(y.flip(2)).flip(2))(
        joined(b, s)
    ),
    "normalized": lambda net, b, s: net.norm(joined(b, s)),
}


def images(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, 16, 16, generator=generator) for _ in range(2)]


def networks(body: Body, config: dict[str, Any] = CPU) -> tuple[nn.Module, nn.Module]:
    """The detector, and the quantized network of it."""
    model = Detector(body).eval()
    return model, quantizer.calibrate(model, config, images(1)).network


def decibels(x: Tensor, y: Tensor) -> float:
    return float(
        10
        * (x.double().square().sum() / (x - y).double().square().sum().clamp_min(1e-30)).log10()
    )


def parts(x: Tensor) -> list[Tensor]:
    """Masks of the large values and of the small ones, channel by channel."""
    axis = next((axis for axis in range(1, x.dim()) if x.shape[axis] in (7, 14)), None)
    if axis is None:
        return [torch.ones_like(x, dtype=torch.bool)]
    others = [other for other in range(x.dim()) if other != axis]
    is_large = x.abs().amax(others, keepdim=True).expand(x.shape) > 10
    return [mask for mask in (is_large, ~is_large) if mask.any()]


def worst(body: Body, config: dict[str, Any] = CPU) -> float:
    """The SQNR of the worst part of any output, on images that calibration has not seen."""
    image, _ = images(2)
    with torch.no_grad():
        exact, rounded = (
            pytree.tree_leaves(network(image)) for network in networks(body, config)
        )
    figures: list[float] = []
    for x, y in zip(exact, rounded, strict=True):
        figures += [decibels(x[mask], y[mask]) for mask in parts(x)]
    return min(figures)


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(RETURNED, *USUAL))
def test_each_part_of_what_is_returned_has_its_own_scale(name: str) -> None:
    assert worst(RETURNED[name]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("body", MULTIPLIED.values(), ids=MULTIPLIED)
def test_small_parts_are_not_lost_in_products(body: Body) -> None:
    assert worst(body) > 38


@pytest.mark.parametrize(
    "name",
    ["scaled in place", "convolved", *extended("cat", "empty, filled", "in a linear layer")],
)
@pytest.mark.parametrize("config", [SYMMETRIC, HIERARCHICAL], ids=["symmetric", "hierarchical"])
def test_other_configs_keep_small_parts_as_well(name: str, config: dict[str, Any]) -> None:
    assert worst({**RETURNED, **MULTIPLIED}[name], config) > 33


def decisions(
    body: Body, config: dict[str, Any] = CPU, folder: Path | None = None
) -> dict[str, Any]:
    """How quant_info.json says that the joins are quantized."""
    assert folder is not None
    quantizer.calibrate(Detector(body).eval(), config, images(1)).save(folder)
    header = json.loads((folder / "quant_info.json").read_text())["header"]
    return {
        name.removeprefix("Detector::Detector/"): entry
        for name, entry in header["joins"].items()
    }


def test_parts_of_about_one_range_share_a_scale(tmp_path: Path) -> None:
    found = decisions(
        lambda net, b, s: net.mix(joined(b / IMAGE, s)), folder=tmp_path / "alike"
    )["cat"]
    assert found["scale"] == "one" and found["lost_db"] < 1
    assert {*found["left"]} == {"Detector::Detector/div", "Detector::Detector/sigmoid.1", MIX}


MIX = "Detector::Detector/Conv2d[mix]/conv2d"


def test_parts_that_one_scale_would_lose_are_brought_to_one_range(tmp_path: Path) -> None:
    found = decisions(MULTIPLIED["convolved"], folder=tmp_path / "apart")["cat"]
    assert found["scale"] == "scaled" and found["lost_db"] > 30
    assert found["lost_bits"]["Detector::Detector/sigmoid.1"] > 9


def test_weights_that_an_algorithm_has_rounded_stay(tmp_path: Path) -> None:
    gptq = HIERARCHICAL | {"algo_config": [{"name": "gptq"}]}
    gptq["global_quant_config"] = {
        "weight": HIERARCHICAL["global_quant_config"]["weight"],
        "input_tensors": INT8,
    }
    found = decisions(MULTIPLIED["in a linear layer"], gptq, tmp_path / "rounded")
    assert found["cat"]["scale"] == "own"


@pytest.mark.parametrize(
    "entry",
    [layer(CAT), layer(type="torch.cat"), layer("re:.*/cat")],
    ids=["name", "type", "pattern"],
)
def test_an_entry_that_names_the_join_gives_it_one_scale(
    entry: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quantizer"):
        found = decisions(RETURNED["cat"], document(entry), tmp_path / "named")["cat"]
    assert found["scale"] == "one"
    assert "0.0 of 8 bits to Detector::Detector/sigmoid.1" in caplog.text
    assert f"remove the entry for {CAT}" in caplog.text


def test_the_dpu_tells_which_part_of_a_join_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quantizer"):
        assert worst(RETURNED["cat"], DPU) < 5
    assert (
        "leaves 0.0 of 8 bits to Detector::Detector/sigmoid.1: return its parts one by one"
        in caplog.text
    )


def test_a_folder_with_scaled_parts_is_read_back(tmp_path: Path) -> None:
    model = Detector(MULTIPLIED["convolved"]).eval()
    result = quantizer.calibrate(model, CPU, images(1))
    result.save(tmp_path / "results")
    image, _ = images(2)
    again = quantizer.load(tmp_path / "results", model)
    assert torch.equal(again.network(image), result.network(image))
    assert {*again.plan.plan.tensors} == {*result.plan.plan.tensors}


class Unwritten(nn.Module):
    """Rows of memory that nobody has written to, filled one by one, and added to what filled
    them.
    """

    def __init__(self, garbage: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.garbage = nn.Linear(8, 32), nn.Linear(32, 4), garbage

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        buffer = torch.empty(2, 4, 32).fill_(self.garbage)
        for row in range(2):
            buffer[row, :3] = h[row, :3]
            buffer[row, 3:] = h[row, 0]
        return self.second(h + buffer)


@pytest.mark.slow
def test_what_is_overwritten_has_no_part_in_scales(tmp_path: Path) -> None:
    data = [
        torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)
    ]
    scales: list[Any] = []
    for garbage in (0.0, 1e30):
        quantizer.calibrate(Unwritten(garbage).eval(), CPU, data).save(tmp_path / str(garbage))
        tensors = json.loads((tmp_path / str(garbage) / "quant_info.json").read_text())[
            "tensors"
        ]
        scales.append(
            [[role["scale"] for role in roles.values()] for roles in tensors.values()]
        )
    assert scales[0] == scales[1]


def close_or_far(net: Detector, b: Tensor, s: Tensor) -> Tensor:
    """A join of about one range, one of rows, and one that is returned, too."""
    alike = joined(b / IMAGE, s)
    return (
        net.mix(alike),
        net.mix(joined(b / IMAGE, 0.5 * s)),
        net.linear(rows(b / IMAGE, s)) + alike.mean(),
    )


def test_retuned_joins_are_those_of_a_calibration_with_that_config(tmp_path: Path) -> None:
    model = Detector(close_or_far).eval()
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
    assert after["tensors"] == wanted["tensors"]
    assert after["header"]["joins"] == wanted["header"]["joins"]
    assert after["header"]["config"] == wanted["header"]["config"]


def test_decisions_follow_ranges_that_are_found_anew() -> None:
    keys = tuple((name, "activation") for name in ("whole", "a", "b"))
    join = JoinPlan("cat", keys[0], keys[1:], keys[1:], (), (), (), (), is_returned=False)
    before = decide_join(join, {"a": 0.0, "b": 1.0}, {"linear": {"a": 1.0, "b": 100.0}})
    assert before.scale == "one" and before.left == keys[1:]
    ranges = dict(zip(keys, (8.0, 8.0, 0.5), strict=True))
    after = decide_joins_again({"cat": before}, ranges)["cat"]
    assert after.scale == "own" and after.left == keys[:1]
    with pytest.raises(ResultError, match="weights would have to change"):
        decide_joins_again(
            {"cat": replace(before, join=replace(join, scalable=("linear",)))}, ranges
        )
    scaled = replace(after, scale="scaled")
    assert decide_joins_again({"cat": scaled}, dict.fromkeys(keys, 8.0))["cat"] == scaled
