"""`quantizer retune`: scales from what was kept are those that a calibration would find, or it
is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document, layer
from support.extended import extended
from support.runs import differing
from test_ranks import MODEL, calib, config_file
from torch import nn

import quantizer
from quantizer import (
    Config,
    Dtype,
    PerTensorPercentileObserver,
    QuantizationConfig,
    QuantizationSpec,
)
from quantizer.cli.main import run_command

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
INT8 = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False}
WEIGHT = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
PERCENTILE = {"observer_cls": "PerTensorPercentileObserver", "percentage": 99.0}
MEAN = {
    "activation": {"method": "percentile", "percentage": 99, "calib_statistic_method": "mean"}
}
STATIC = {
    "global_quant_config": {"weight": WEIGHT, "input_tensors": INT8, "output_tensors": INT8}
}
REPORT = {"report.json", "report.html"}
CONFIGS: dict[str, dict[str, Any]] = {
    "maxmin": document(),
    "percentile": document(tensor=MEAN),
    "asymmetric": document(overall={"symmetry": False, "calib_statistic_method": "mean"}),
    "entries": document(layer(type="linear", calib_statistic_method="median"), tensor=MEAN),
    "gptq": document() | {"algorithms": [{"name": "gptq"}]},
    "smoothquant": STATIC | {"pre_quant_opt_config": [{"name": "smooth", "alpha": 0.5}]},
    "hierarchical": STATIC,
    "pooled": {"global_quant_config": {"weight": WEIGHT, "input_tensors": INT8 | PERCENTILE}},
}


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


@pytest.fixture(scope="module")
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By the name of a config: its calibration, which is done once and must stay as it is."""

    @cache
    def calibrate(name: str) -> Path:
        place = tmp_path_factory.mktemp("calibrated")
        net, config = place / "net.py", place / "out.json"
        net.write_text(MODEL)
        config.write_text(json.dumps(CONFIGS[name], indent=1))
        assert run_command(calib(str(net), str(config), place / "out", "-q")) == 0
        return place / "out"

    return calibrate


@pytest.fixture
def calibrated(calibrated_once: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """By the name of a config: a copy of its calibration."""

    def copy(name: str, folder: str = "out") -> Path:
        return Path(shutil.copytree(calibrated_once(name), tmp_path / folder))

    return copy


def specs_of(plan: dict[str, Any]) -> list[Any]:
    rows = [
        (row["name"], role, tensor["spec"])
        for row in plan["layers"]
        for role, tensor in row.get("tensors", {}).items()
    ]
    return [plan["paths"], plan["weight_bytes"], rows]


@pytest.mark.parametrize(
    ("config", "words", "apart"),
    [
        *extended(
            ("maxmin", ["--statistic", "mean"], set()),
            ("percentile", ["--statistic", "median"], set()),
            ("percentile", ["--method", "maxmin"], set()),
        ),
        ("percentile", ["--method", "maxmin", "--statistic", "max", "--layer", "relu"], set()),
        *extended(("asymmetric", ["--statistic", "max"], set())),
        ("entries", ["--method", "maxmin", "--statistic", "mean"], set()),
        ("gptq", ["--statistic", "mean"], set()),
        *extended(
            ("smoothquant", ["--method", "percentile"], set()),
            ("hierarchical", ["--method", "percentile"], set()),
        ),
        (
            "hierarchical",
            ["--method", "percentile", "--percentage", "99.5", "--layer", "head"],
            REPORT,
        ),
        *extended(
            ("hierarchical", ["--method", "mse"], set()),
            ("pooled", ["--percentage", "97"], set()),
            ("pooled", ["--method", "mse"], set()),
        ),
        (
            "pooled",
            ["--method", "maxmin"],
            REPORT | {"quant_info.json", "statistics.safetensors"},
        ),
    ],
)
def test_it_is_a_calibration_with_the_changed_config(
    config: str,
    words: list[str],
    apart: set[str],
    net: str,
    calibrated: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Of one histogram the outermost values are known, but not batch by batch: then statistics
    are others, no scale.

    The report names the lines of the config; those of an entry for a layer in the hierarchical
    form are one.
    """
    folder, changed = calibrated(config), tmp_path / "changed" / "new.json"
    changed.parent.mkdir()
    before = (folder / "quant_info.json").read_bytes()
    written = ["--output_dir", str(tmp_path / "retuned"), "-o", str(changed)]
    assert run_command(["retune", str(folder), *words, *written]) == 0
    assert run_command(calib(net, str(changed), tmp_path / "anew", "-q")) == 0
    assert (
        differing(tmp_path / "anew", tmp_path / "retuned")
        == {"plan.json", "checksums.json"} | apart
    )
    plans = [
        json.loads((tmp_path / at / "plan.json").read_text()) for at in ("anew", "retuned")
    ]
    assert "rules" in plans[0] and "rules" not in plans[1]
    assert plans[0]["config"] == plans[1]["config"]
    assert plans[1]["config"]["name"] == changed.name
    assert specs_of(plans[0]) == specs_of(plans[1])
    if "--layer" not in words:
        del plans[0]["rules"]
        assert plans[0] == plans[1], "and each word has its place"
    anew, retuned = (
        json.loads((tmp_path / at / "quant_info.json").read_text())
        for at in ("anew", "retuned")
    )
    assert anew["tensors"] == retuned["tensors"]
    assert (
        (folder / "quant_info.json").read_bytes()
        == before
        != (tmp_path / "retuned" / "quant_info.json").read_bytes()
    )
    test = [
        "--quant_mode",
        "test",
        "--model",
        net,
        "--output_dir",
        str(tmp_path / "retuned"),
        "-q",
    ]
    assert run_command([*test, "--config_file", str(changed)]) == 0


@pytest.mark.parametrize(
    ("config", "words", "code", "said"),
    [
        (
            "percentile",
            ["--method", "mse"],
            5,
            "mse needs a histogram of each batch, and the range of each is kept",
        ),
        ("maxmin", ["--method", "percentile"], 5, "percentile needs a histogram of each batch"),
        ("maxmin", ["--method", "maxmin"], 2, "nothing changes"),
        ("maxmin", [], 2, "there is nothing to change"),
        (
            "percentile",
            ["--method", "maxmin", "--percentage", "99"],
            2,
            "--percentage is for the percentile method",
        ),
        ("hierarchical", ["--statistic", "mean"], 2, "--statistic is for the layered form"),
        (
            "hierarchical",
            ["--method", "entropy"],
            2,
            "the hierarchical form has no observer for entropy per_tensor",
        ),
        ("maxmin", ["--statistic", "mean", "--layer", "rellu"], 2, "did you mean relu?"),
    ],
)
def test_what_was_not_kept_or_said_is_refused_and_nothing_is_written(
    config: str,
    words: list[str],
    code: int,
    said: str,
    calibrated: Callable[..., Path],
    capsys: Capture,
) -> None:
    folder = calibrated(config)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert run_command(["retune", str(folder), *words]) == code
    assert said in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bias correction", "bias correction needs the outputs of the quantized network"),
        ("dpu", "scales for the DPU are aligned with each other"),
        ("weights", "it was quantized without data"),
    ],
)
def test_what_depends_on_scales_is_refused(
    kind: str, said: str, net: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = str(tmp_path / "out")
    assert run_command(calib(net, config_file(tmp_path, kind), tmp_path / "out", "-q")) == 0
    assert run_command(["retune", folder, "--method", "maxmin"]) == 5
    printed = capsys.readouterr().err
    assert f"{folder} cannot be retuned: {said}" in printed
    edit = '"include_bias_corr": false in bias_correction.json can be retuned'
    assert (edit in printed) == (kind == "bias correction")


def test_it_writes_in_place_and_a_dry_run_writes_nothing(
    net: str, calibrated: Callable[..., Path], capsys: Capture
) -> None:
    folder = calibrated("maxmin")
    before = (folder / "quant_info.json").read_bytes()
    capsys.readouterr()
    assert run_command(["retune", str(folder), "--statistic", "mean", "--dry_run"]) == 0
    assert "10 tensors would change; nothing is written" in capsys.readouterr().out
    assert (folder / "quant_info.json").read_bytes() == before
    assert run_command(["retune", str(folder), "--statistic", "mean", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["tensors"]) == 10 and all(
        row["scale"] < row["scale_before"] for row in said["tensors"]
    )
    entries = json.loads((folder / "quant_info.json").read_text())["tensors"]
    assert all(
        entries[row["layer"]][row["tensor"]]["scale"] == row["scale"] for row in said["tensors"]
    )
    assert (
        run_command(["--quant_mode", "test", "--model", net, "--output_dir", str(folder), "-q"])
        == 0
    )


@pytest.mark.parametrize("kind", ["dict", "Config"])
def test_a_config_of_python_is_changed_where_it_speaks(kind: str, tmp_path: Path) -> None:
    """It has no text, so its places are paths of values; the narrower level says another method
    than the wider.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    data = [torch.randn(8, 6) * (1 + at) for at in range(4)]
    wide = QuantizationSpec(dtype=Dtype.int8)
    narrow = QuantizationSpec(
        dtype=Dtype.int8, observer_cls=PerTensorPercentileObserver, percentage=99.0
    )
    first = QuantizationConfig(weight=wide, input_tensors=wide)
    built = Config(
        first, layer_quant_config={"2": QuantizationConfig(weight=wide, input_tensors=narrow)}
    )
    plain = {
        "global_quant_config": {
            "weight": {"dtype": "int8"},
            "input_tensors": {"dtype": "int8"},
        },
        "layer_quant_config": {
            "2": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"} | PERCENTILE}
        },
    }
    quantizer.calibrate(model, built if kind == "Config" else plain, data).save(
        tmp_path / "out"
    )
    words = [
        "--method",
        "mse",
        "--output_dir",
        str(tmp_path / "retuned"),
        "-o",
        str(tmp_path / "q.json"),
    ]
    assert run_command(["retune", str(tmp_path / "out"), *words]) == 0
    quantizer.calibrate(model, tmp_path / "q.json", data).save(tmp_path / "anew")
    anew, retuned = (
        json.loads((tmp_path / at / "quant_info.json").read_text())
        for at in ("anew", "retuned")
    )
    assert anew["tensors"] == retuned["tensors"]
    assert anew["header"]["config"] == retuned["header"]["config"]


def test_nothing_is_left_of_what_was_in_the_folder_before(
    calibrated: Callable[..., Path],
) -> None:
    plain, other = calibrated("maxmin"), calibrated("gptq", "other")
    assert (other / "algorithms.json").exists()
    words = ["retune", str(plain), "--statistic", "mean", "--output_dir", str(other)]
    assert run_command(words) == 2
    assert (other / "algorithms.json").exists(), "another calibration is not thrown away"
    assert run_command([*words, "--overwrite"]) == 0
    assert not (other / "algorithms.json").exists()
    assert json.loads((other / "report.json").read_text())["algorithms"] is None
