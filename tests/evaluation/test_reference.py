"""Outputs are compared with the user's model, whatever passes made of it; biases are absorbed
where data allow it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.extended import extended
from support.forked import run_ranks
from support.runs import calibrate, check
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import ResultError
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.passes.fold_batch_norm import fold_batch_norm
from quantizer.results.write import write_info

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
CPU = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
DPU = json.loads((ROOT / "configs" / "dpu.json").read_text())
CLE = CPU | {"include_cle": True}
HIERARCHICAL = {
    "global_quant_config": {
        "weight": {
            "dtype": "int8",
            "qscheme": "per_channel",
            "ch_axis": 0,
            "is_dynamic": False,
        },
        "input_tensors": {
            "dtype": "uint8",
            "qscheme": "per_tensor",
            "symmetric": False,
            "is_dynamic": False,
        },
    },
    "pre_quant_opt_config": [{"name": "cle"}],
}


class Norms(nn.Module):
    """Two convolutions whose batch norms promise values far above zero."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.activation = activation
        self.pool = nn.AvgPool2d(3)
        self.head = nn.Conv2d(8, 4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first_norm(self.first(x)))
        x = self.activation(self.second_norm(self.second(x)))
        return self.pool(self.head(x))


def images(count: int, contrast: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [contrast * torch.randn(4, 3, 24, 24, generator=generator) for _ in range(count)]


def network(activation: nn.Module) -> nn.Module:
    """The model, its norms trained on images of contrast 1."""
    torch.manual_seed(0)
    model = Norms(activation)
    for norm in (model.first_norm, model.second_norm):
        norm.momentum = None
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.uniform_(3, 6)
    model.train()
    with torch.no_grad():
        model(torch.cat(images(16, 1.0, seed=9)))
    return model.eval()


def ratio_db(exact: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The SQNR of all values of some outputs."""
    signal = math.fsum(float(x.double().square().sum()) for x in exact)
    noise = math.fsum(
        float((x.double() - y.double()).square().sum())
        for x, y in zip(exact, other, strict=True)
    )
    return 10 * math.log10(signal / noise)


def decisions(folder: Path) -> dict[str, bool]:
    """For each first layer, by the attribute of its module, whether the next one absorbs its
    high biases.
    """
    header = json.loads((folder / "quant_info.json").read_text())["header"]
    rows = header["absorption"]["layers"]
    return {
        name.partition("[")[2].partition("]")[0]: row["absorbed"] for name, row in rows.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "activation", "contrast", "names"),
    [
        (CPU, nn.ReLU(), 3.0, None),
        (CLE, nn.ReLU(), 3.0, ["absorb_high_biases"]),
        (HIERARCHICAL, nn.ReLU(), 3.0, ["absorb_high_biases"]),
        # Both biases are absorbed, and on such data nothing lies where that would change it.
        (CLE, nn.ReLU(), 1.0, None),
        (HIERARCHICAL, nn.ReLU(), 1.0, None),
        (CPU | {"convert_relu6_to_relu": True}, nn.ReLU6(), 1.0, ["convert_relu6_to_relu"]),
        (CPU | {"convert_relu6_to_relu": True}, nn.ReLU(), 1.0, None),
        (CPU | {"convert_silu_to_hswish": True}, nn.SiLU(), 3.0, ["convert_silu_to_hswish"]),
        (DPU, nn.ReLU(), 1.0, ["dpu_average_pooling"]),
        (
            DPU | {"convert_relu6_to_relu": True},
            nn.ReLU6(),
            1.0,
            ["convert_relu6_to_relu", "dpu_average_pooling"],
        ),
    ],
)
def test_the_figure_is_against_the_users_model_and_passes_have_one_of_their_own(
    config: dict[str, Any], activation: nn.Module, contrast: float, names: list[str] | None
) -> None:
    model, data = network(activation), images(3, contrast, seed=1)
    calibrated = quantizer.calibrate(model, config, data)
    tested = calibrated.test()
    with torch.no_grad():
        exact = [model(x) for x in data]
        found = [calibrated.network(x) for x in data]
    assert tested.metrics["sqnr_db"] == pytest.approx(ratio_db(exact, found), abs=1e-3)
    report = tested.to_json()
    if names is None:
        assert "passes" not in report
        return
    figures = report["passes"]
    assert figures["names"] == names
    assert figures["together_db"] == pytest.approx(ratio_db(exact[:1], found[:1]), abs=1e-3)
    shares = [10 ** (-figures[name] / 10) for name in ("passes_db", "quantization_db")]
    assert 10 ** (-figures["together_db"] / 10) < 2 * sum(shares), (
        "two errors, of which neither hides the other"
    )


def test_a_pass_that_changes_the_function_and_says_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The float network after it is as wrong as the quantized one, so no figure shows it."""
    model, data = network(nn.ReLU()), images(2, 1.0, seed=1)
    quantizer.calibrate(model, CPU, data)
    assert "have changed what" not in caplog.text

    def fold_wrongly(graph: Graph) -> Graph:
        folded = fold_batch_norm(graph)
        name = next(node.name for node in folded.nodes if node.op == "conv2d")
        weight = folded.weight(folded.by_name[name])
        return with_weights(folded, {name: {"weight": weight * 3}})

    place = "quantizer.graph.passes.fold_batch_norm.fold_batch_norm"
    monkeypatch.setattr(place, fold_wrongly)
    state = torch.get_rng_state()
    quantizer.calibrate(model, CPU, data)
    assert "passes or algorithms have changed what Norms computes in float" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)


def test_a_conversion_alone_is_as_far_from_the_model_as_passes_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And files may differ from test mode by what quantization costs, however much a conversion
    does.
    """
    model, data = network(nn.ReLU6()), images(2, 1.0, seed=1)
    calibrated = quantizer.calibrate(model, CPU | {"convert_relu6_to_relu": True}, data)
    figures = calibrated.test().to_json()["passes"]
    allowed = []
    monkeypatch.setattr(
        "quantizer.api.result.export",
        lambda target, given, *_, total: allowed.append(given.sqnr_db),
    )
    calibrated.export("safetensors", tmp_path / "net.safetensors")
    with torch.no_grad():
        exact = model(data[0])
        model.activation = nn.ReLU()
        converted = [model(x) for x in data]
        found = [calibrated.network(x) for x in data]
    assert figures["passes_db"] == pytest.approx(ratio_db([exact], converted[:1]), abs=1e-3)
    assert figures["quantization_db"] == pytest.approx(
        ratio_db(converted[:1], found[:1]), abs=1e-3
    )
    assert allowed == [pytest.approx(ratio_db(converted, found), abs=1e-3)]


def test_equalization_costs_nothing_where_data_are_not_as_norms_promise() -> None:
    model, data = network(nn.ReLU()), images(4, 3.0, seed=1)
    plain, equalized = (
        quantizer.calibrate(model, config, data).test().metrics["sqnr_db"]
        for config in (CPU, CLE)
    )
    assert equalized > plain - 1


def test_analyze_measures_against_the_users_model(
    tmp_path: Path, toy: str, capsys: Capture
) -> None:
    """What each tensor costs alone is not hidden by what the conversion costs."""
    config = CPU | {"convert_relu6_to_relu": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    Path(toy).write_text(Path(toy).read_text().replace("nn.ReLU()", "nn.ReLU6()"))
    given = [
        "--tensors",
        "--json",
        "--config_file",
        str(path),
        "--model",
        toy,
        "--data",
        f"{toy}:promised",
    ]
    assert run_command(["analyze", *given, "--subset_len", "8"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    model, data = network(nn.ReLU6()), images(6, 1.0, seed=1)[:2]
    calibrated = quantizer.calibrate(model, config, data)
    with torch.no_grad():
        expected = ratio_db([model(x) for x in data], [calibrated.network(x) for x in data])
    assert tensors["output_sqnr_db"] == pytest.approx(expected, abs=1e-3)
    assert all(row["alone_db"] > expected + 3 for row in tensors["tensors"])


MODEL = """
import sys
sys.path.insert(0, {folder!r})
from test_reference import images, network, nn


def model():
    return network(nn.ReLU())


def promised():
    return images(6, 1.0, seed=1)


def contrasted():
    return images(6, 3.0, seed=1)


def late():
    return images(4, 1.0, seed=1) + images(2, 3.0, seed=2)


def soon():
    return images(3, 1.0, seed=1) + images(3, 3.0, seed=2)
"""


@pytest.fixture
def toy(tmp_path: Path) -> str:
    path = tmp_path / "toy.py"
    path.write_text(MODEL.format(folder=str(Path(__file__).parent)))
    return str(path)


def calibrated_on(tmp_path: Path, toy: str, data: str, config: dict[str, Any] = CLE) -> Path:
    """A result folder of the toy on what one of its functions gives."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = tmp_path / data
    given = ["--data", f"{toy}:{data}"]
    assert calibrate(folder, *given, model=toy, config=str(tmp_path / "config.json")) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "data", "second"),
    [
        (CLE, "promised", True),
        (CLE, "late", True),
        (CLE, "soon", False),
        *extended((HIERARCHICAL, "late", True)),
        (HIERARCHICAL, "soon", False),
        (DPU | {"include_cle": True}, "soon", False),
    ],
)
def test_the_first_four_batches_decide_and_test_mode_runs_the_same_graph(
    tmp_path: Path, toy: str, data: str, second: bool, config: dict[str, Any], capsys: Capture
) -> None:
    folder = calibrated_on(tmp_path, toy, data, config)
    assert decisions(folder) == {"first": True, "second": second}
    header = json.loads((folder / "quant_info.json").read_text())["header"]
    assert header["absorption"]["batches"] == 4
    assert check(folder, "--data", f"{toy}:contrasted", model=toy) == 0
    printed = capsys.readouterr().out
    passes = json.loads((folder / "report.json").read_text())["passes"]
    assert json.loads((folder / "run.json").read_text())["passes"] == passes
    assert "absorb_high_biases" in passes["names"]
    assert f"passes: {passes['passes_db']:.1f} dB, quantization: " in printed
    assert (
        f"passes: {passes['passes_db']:.1f} dB, quantization: "
        in (folder / "report.html").read_text()
    )


def test_python_loads_the_graph_that_was_calibrated(tmp_path: Path, toy: str) -> None:
    x = images(1, 1.0, seed=3)
    for data, contrast in (("promised", 1.0), ("contrasted", 3.0)):
        folder = calibrated_on(tmp_path, toy, data)
        saved = quantizer.load(folder, network(nn.ReLU()), x)
        again = quantizer.calibrate(network(nn.ReLU()), CLE, images(6, contrast, seed=1))
        assert torch.equal(saved.network(x[0]), again.network(x[0]))


@pytest.mark.slow
def test_retuning_and_merging_keep_the_decision(
    tmp_path: Path, toy: str, capsys: Capture
) -> None:
    config = CLE | {"include_bias_corr": False}
    refused = calibrated_on(tmp_path, toy, "contrasted", config)
    assert (
        run_command(
            [
                "retune",
                str(refused),
                "--method",
                "maxmin",
                "--output_dir",
                str(tmp_path / "tuned"),
            ]
        )
        == 0
    )
    assert check(tmp_path / "tuned", "--data", f"{toy}:contrasted", model=toy) == 0
    assert decisions(tmp_path / "tuned") == decisions(refused)
    soon = calibrated_on(tmp_path, toy, "soon", config)
    merged = tmp_path / "merged"
    assert (
        run_command(["merge", str(refused), str(soon), "--model", toy, "-o", str(merged), "-q"])
        == 0
    )
    assert decisions(merged) == decisions(refused)
    assert check(merged, "--data", f"{toy}:contrasted", model=toy) == 0
    promised = calibrated_on(tmp_path, toy, "promised", config)
    capsys.readouterr()
    assert (
        run_command(
            ["merge", str(refused), str(promised), "--model", toy, "-o", str(merged), "-q"]
        )
        == 5
    )
    assert "only one of them absorbed the high biases of " in capsys.readouterr().err


@pytest.mark.slow
def test_of_several_ranks_the_first_decides(tmp_path: Path, toy: str) -> None:
    alone = calibrated_on(tmp_path, toy, "soon")
    given = [
        "--quant_mode",
        "calib",
        "--model",
        toy,
        "--data",
        f"{toy}:soon",
        "--subset_len",
        "64",
    ]
    given += [
        "--config_file",
        str(tmp_path / "config.json"),
        "--output_dir",
        str(tmp_path / "ranks"),
    ]
    found = run_ranks(2, given, tmp_path / "logs")
    assert [rank.code for rank in found] == [0, 0], found[0].err
    assert (tmp_path / "ranks" / "quant_info.json").read_bytes() == (
        alone / "quant_info.json"
    ).read_bytes()


def test_known_traces_change_nothing(tmp_path: Path, toy: str, capsys: Capture) -> None:
    first = calibrated_on(tmp_path, toy, "contrasted")
    before = (first / "quant_info.json").read_bytes()
    given = [
        "--model",
        toy,
        "--config_file",
        str(tmp_path / "config.json"),
        "--data",
        f"{toy}:contrasted",
    ]
    for _ in range(2):
        assert run_command(["plan", *given]) == 0
        assert "layers whose high biases the next one absorbs: 2" in capsys.readouterr().err
    calibrated_on(tmp_path, toy, "contrasted")
    assert (first / "quant_info.json").read_bytes() == before


def test_a_decision_about_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model, data = network(nn.ReLU()), images(1, 3.0, seed=1)
    quantizer.calibrate(model, CLE, data).save(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "quant_info.json").read_text())
    rows = content["header"]["absorption"]["layers"]
    rows["Norms::nothing"] = next(iter(rows.values()))
    write_info(tmp_path / "out", content["header"], content["tensors"])
    with pytest.raises(
        ResultError, match="header/absorption/layers/Norms::nothing: there is no layer"
    ):
        quantizer.load(tmp_path / "out", model, data)


def test_without_data_batch_norms_are_believed(tmp_path: Path, toy: str) -> None:
    config = document(include_cle=True, quantizable_data_type=["weights"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Path(toy).open("a") as file:
        file.write("\n\ndef example_input():\n    return images(1, 3.0, seed=1)[0]\n")
    folder = tmp_path / "out"
    assert calibrate(folder, model=toy, config=str(tmp_path / "config.json")) == 0
    assert "absorption" not in json.loads((folder / "quant_info.json").read_text())["header"]
    changes = json.loads((folder / "plan.json").read_text())["changes"]
    assert "absorb_high_biases" in {change["pass"] for change in changes}
    checked = calibrated_on(tmp_path, toy, "contrasted", config)
    assert decisions(checked) == {"first": True, "second": False}
