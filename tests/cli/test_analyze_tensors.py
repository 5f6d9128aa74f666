"""`analyze --tensors` and `--metric`: what each tensor costs the output, what has to stay in
float for a metric.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from test_ranks import MODEL

from quantizer.calibration import steps
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.solution import quantized_network
from quantizer.calibration.target import Target
from quantizer.cli.main import run_command
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.evaluation.ablation import ablate
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.numerics.metrics import energy
from quantizer.plan.model import Key
from quantizer.results.calibrated import Calibrated
from quantizer.sources.data import load_batches

Capture = pytest.CaptureFixture[str]
COARSE = {"bit_width": 4, "symmetry": False, "signed": False}
EXACT = """
import torch

def model():
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.ones_(layer.weight)
    return layer.eval()

def calibration_data():
    return [torch.ones(4, 3)]
"""
MIXED = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2))

def calibration_data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 4, generator=generator)]
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


def written(tmp_path: Path, content: dict[str, Any]) -> str:
    (tmp_path / "q.json").write_text(json.dumps(content))
    return str(tmp_path / "q.json")


class Branches(torch.nn.Module):
    """Activations that are computed in place wait while others are."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = (
            torch.nn.Linear(6, 8),
            torch.nn.Linear(6, 8),
            torch.nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        return self.last(torch.nn.functional.silu(left) * torch.nn.functional.leaky_relu(right))


def test_each_figure_is_that_of_a_network_with_just_that_tensor_or_with_all_others() -> None:
    torch.manual_seed(0)
    model, data = Branches().eval(), [torch.randn(16, 6) for _ in range(3)]
    config = check_document(Document.of(document(overall=COARSE), "config")).require()
    original, batches = trace(model, (data[0],)), load_batches(data)
    request = CalibrationRequest(target=Target(original), config=config, batches=batches)
    solution = steps.run_calibration(request).solution
    calibrated = Calibrated(original, config.settings, solution)
    reference = Network(calibrated.float_graph)

    def noise(keep: set[Key]) -> float:
        tensors = {key: tensor for key, tensor in solution.tensors.items() if key in keep}
        network = quantized_network(calibrated.graph, replace(solution, tensors=tensors))
        return math.fsum(energy(reference(x) - network(x)) for x in data)

    found, everything = (
        ablate(reference, calibrated.network(), batches),
        set(solution.tensors),
    )
    assert {effect.key for effect in found.effects} == everything
    assert math.fsum(found.noise) == pytest.approx(noise(everything), rel=1e-6)
    for effect in found.effects:
        assert math.fsum(effect.alone) == pytest.approx(
            noise({effect.key}), rel=1e-6, abs=1e-12
        ), effect.key
        assert math.fsum(effect.without) == pytest.approx(
            noise(everything - {effect.key}), rel=1e-6
        ), effect.key
    assert found.floor_db is not None and 0 < found.floor_db < 10
    again = ablate(reference, calibrated.network(), batches, is_alone_measured=False)
    assert again.best == found.best
    assert (again.signal, again.noise) == (found.signal, found.noise)
    for effect, other in zip(found.effects, again.effects, strict=True):
        assert (other.key, other.without) == (effect.key, effect.without)
        assert not other.alone


def test_tensors_are_listed_and_the_report_shows_them(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    config, out = written(tmp_path, document(overall=COARSE)), str(tmp_path / "out")
    given = ["--config_file", config, "--model", net]
    assert run_command(["--quant_mode", "calib", *given, "--output_dir", out, "-q"]) == 0
    capsys.readouterr()
    assert run_command(["analyze", "--tensors", *given, "--report", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["tensors"]["tensors"]
    assert len(rows) == 22 and rows == sorted(rows, key=lambda row: -row["gain_db"])
    assert found["tensors"]["noise_floor_db"] > 0
    sizes = [point["weight_bytes"] for point in found["curve"]]
    ratios = [point["predicted_db"] for point in found["curve"]]
    assert sizes == sorted(sizes) and ratios == sorted(ratios) and len(sizes) > 5
    assert min(sizes) == found["uniform"]["2"]["weight_bytes"]
    assert max(sizes) == found["uniform"]["8"]["weight_bytes"]
    page = Path(out, "report.html").read_text()
    assert 'id="sensitivity"' in page and "Output SQNR by size of the weights" in page
    assert (
        json.loads(Path(out, "report.json").read_text())["analysis"]["tensors"]
        == found["tensors"]
    )
    assert run_command(["--quant_mode", "calib", *given, "--output_dir", out, "-q"]) == 0
    assert 'id="sensitivity"' not in Path(out, "report.html").read_text(), (
        "it was of the calibration before"
    )


HIERARCHICAL = {
    "global_quant_config": {
        "weight": {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0},
        "input_tensors": {"dtype": "int8"},
    }
}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "least"), [("layered", 22), ("hierarchical", 29)])
def test_the_fewest_bytes_stay_in_float_for_which_a_metric_holds(
    form: str, least: int, net: str, tmp_path: Path, capsys: Capture
) -> None:
    config = written(tmp_path, document(overall=COARSE) if form == "layered" else HIERARCHICAL)
    given, written_to = (
        ["--config_file", config, "--model", net, "--data", f"{net}:calibration_data"],
        tmp_path / "ok.json",
    )
    given += ["--subset_len", "8"]
    metric = ["--metric", f"sqnr_db>={least}", "-o", str(written_to), "--json"]
    assert run_command(["analyze", *given, *metric]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["before"]["sqnr_db"] < least <= found["metrics"]["after"]["sqnr_db"]
    layers = [name for part in found["float"] for name in part["layers"]]
    assert 0 < len(layers) < 13
    tested = [
        "--model",
        net,
        "--data",
        f"{net}:calibration_data",
        "--output_dir",
        str(tmp_path / "out"),
        "-q",
        "--json",
        "--subset_len",
        "8",
    ]
    assert (
        run_command(["--quant_mode", "calib", "--config_file", str(written_to), *tested]) == 0
    )
    capsys.readouterr()
    assert run_command(["--quant_mode", "test", *tested, "--gate", f"sqnr_db>={least}"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == found["metrics"]["after"]
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert not any(row.get("tensors") for row in plan["layers"] if row["name"] in layers)


@pytest.mark.slow
def test_apply_changes_the_config_and_then_it_holds_already(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    config = written(tmp_path, document(overall=COARSE))
    command = [
        "analyze",
        "--config_file",
        config,
        "--model",
        net,
        "--data",
        f"{net}:calibration_data",
    ]
    command += ["--subset_len", "8", "--metric", "cosine>=0.997", "--apply"]
    assert run_command(command) == 0
    assert "in float" in capsys.readouterr().out
    first = Path(config).read_text()
    assert run_command(command) == 0
    assert "already holds: nothing is changed" in capsys.readouterr().out
    assert json.loads(Path(config).read_text()) == json.loads(first)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["--metric", "sqnr_db>=1e9"],
            1,
            "sqnr_db>=1e9 holds only with all layers in float, where nothing is quantized",
        ),
        (
            ["--metric", "top1>=2"],
            1,
            "top1>=2 does not hold even with all these layers in float",
        ),
        (["--metric", "sqnr>=2"], 2, "--metric 'sqnr>=2': there is no metric 'sqnr'"),
        (["--tensors", "--report", "nowhere"], 5, "nowhere/quant_info.json does not exist"),
        (["--metric", "sqnr_db>=2", "--budget", "4"], 2, "exclude each other"),
        (["--apply"], 2, "--apply writes a changed config"),
    ],
)
def test_what_cannot_be_met_is_said(
    words: list[str], code: int, said: str, net: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "plain.py").write_text(MODEL.partition("def evaluate")[0])
    config = written(tmp_path, document(overall=COARSE))
    before = Path(config).read_bytes()
    given = [
        "--config_file",
        config,
        "--model",
        str(tmp_path / "plain.py"),
        "--data",
        f"{net}:calibration_data",
    ]
    assert (
        run_command(
            ["analyze", *given, *words, "-o", "-"]
            if "--apply" not in words
            else ["analyze", *given, *words]
        )
        == code
    )
    assert said in capsys.readouterr().err
    assert Path(config).read_bytes() == before


@pytest.mark.slow
def test_figures_without_noise_are_null_in_json(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    config = written(tmp_path, {"global_quant_config": {"weight": {"dtype": "bfloat16"}}})
    model = tmp_path / "exact.py"
    model.write_text(EXACT)
    command = ["analyze", "--config_file", config, "--model", str(model)]
    assert run_command([*command, "--metric", "sqnr_db>=10", "--json"]) == 0
    text = capsys.readouterr().out
    assert "Infinity" not in text
    assert json.loads(text)["metrics"]["after"]["sqnr_db"] is None


COMMENTED = """{
    "//": "why it is so",
    "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0},
                            "input_tensors": {"dtype": "int8"}, "output_tensors": {"dtype": "int8"}}
}
"""


def test_a_search_prints_a_line_a_trial_and_edits_only_what_changes(
    tmp_path: Path, capsys: Capture
) -> None:
    """Even if it leaves most parameters in float, what it writes draws no warning."""
    config = tmp_path / "net.json"
    config.write_text(COMMENTED)
    model = tmp_path / "mixed.py"
    model.write_text(MIXED)
    given = ["--config_file", str(config), "--model", str(model)]
    assert run_command(["analyze", *given, "--metric", "sqnr_db>=30", "--apply"]) == 0
    shown = capsys.readouterr()
    notes = shown.err.splitlines()
    trials = [line for line in notes if re.fullmatch(r"\d layers? in float: sqnr_db .*", line)]
    assert len(trials) >= 3
    assert len(notes) == len(trials)
    assert "warning" not in shown.err
    text = config.read_text()
    assert text.startswith(COMMENTED.rstrip().removesuffix("\n}"))
    added = json.loads(text)["exclude"]
    assert 0 < len(added) < 3
    assert run_command(["validate", "--strict", str(config)]) == 0
    capsys.readouterr()
    assert run_command(["plan", *given]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_report_of_another_model_or_config_takes_no_analysis(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    given = ["--config_file", written(tmp_path, document()), "--model", net]
    out = str(tmp_path / "out")
    assert run_command(["--quant_mode", "calib", *given, "--output_dir", out, "-q"]) == 0
    written(tmp_path, document(overall=COARSE))
    assert run_command(["analyze", *given, "--report", out]) == 5
    assert "the config is not the calibrated one" in capsys.readouterr().err
    written(tmp_path, document())
    Path(net).write_text(MODEL.replace("manual_seed(0)", "manual_seed(3)"))
    assert run_command(["analyze", *given, "--report", out]) == 5
    assert "the weights are not those that were calibrated" in capsys.readouterr().err
    assert not Path(out, "analysis.json").exists()
