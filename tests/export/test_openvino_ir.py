"""The openvino target: OpenVINO reads both files, multiplies in integers, and decides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.deployments import WIDEST_IN_INT8, deployment, outputs_of, written
from support.runs import ROOT, calibrate, check
from torch import Tensor, nn

import quantizer
from quantizer.errors import VerificationError
from quantizer.export.exporting import export
from quantizer.export.onnx.build import BuiltOnnx
from quantizer.export.openvino_ir import exporter as ir_exporter
from quantizer.export.performance import Speed

ov = pytest.importorskip("openvino", reason="the engine (extra: openvino)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")


@pytest.fixture(autouse=True)
def not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir_exporter, "_speed", lambda session: None)


def test_openvino_reads_both_files(tmp_path: Path) -> None:
    file = written("openvino", "residual", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "residual.bin",
        "residual.openvino",
    ]
    core = ov.Core()
    model = core.read_model(str(file.path), str(tmp_path / "residual.bin"))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    outputs = compiled(file.given.args[0].numpy())[0]
    expected = outputs_of(file.given)[0].numpy()
    noise = float(np.square(outputs - expected).sum())
    assert noise < 1e-4 * float(np.square(expected).sum())
    session = file.found.default_session
    assert session is not None
    assert session.kernels is not None
    assert len(session.kernels.integer) == 5
    assert list(session.kernels.floating.values()) == ["its input is not quantized"]


class Residual(nn.Module):
    """A convolution and a SiLU, whose sum with other values OpenVINO would compute at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.middle, self.act = nn.Conv2d(32, 32, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        z: Tensor = y + self.act(self.last(self.act(self.middle(y))))
        return z


def test_results_of_convolutions_are_rounded_before_sums(tmp_path: Path) -> None:
    """Without that it is 46 dB (OpenVINO 2026.4.1)."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    config = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
    config["tensor_quantize_config"]["weights"]["bit_width"] = WIDEST_IN_INT8
    result = quantizer.calibrate(Residual().eval(), config, [x])
    verified = result.export("openvino", tmp_path / "net.xml", [x])
    assert verified.default_session is not None
    assert verified.default_session.kernels is not None
    assert verified.default_session.kernels.share == 1.0
    assert verified.sqnr_db is not None
    assert verified.sqnr_db >= 60


class Mixer(nn.Module):
    """Means over tokens, which OpenVINO would multiply by the scales of other channels; and a
    choice among values that are often equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(1) * self.scale
        place = self.embed(x).amax(2).topk(5).indices
        return self.head(mean), place


def test_reductions_and_equal_values_are_as_in_onnx(tmp_path: Path) -> None:
    """Without changes of OpenVINO's network it is 7 dB, and half of the places are others."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 16)
    preset = ROOT / "configs" / "cpu_int8.json"
    result = quantizer.calibrate(Mixer().eval(), preset, [x])
    verified = result.export("openvino", tmp_path / "net.xml", [x])
    assert verified.sqnr_db is not None
    assert verified.sqnr_db >= 100
    assert verified.within_step == 1.0


def test_other_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = ir_exporter.build_onnx

    def wrong(*args: object, **kwargs: object) -> BuiltOnnx:
        built = build(*args, **kwargs)  # type: ignore[arg-type]
        for tensor in built.proto.graph.initializer:
            if tensor.name.endswith("weights.codes"):
                codes = np.frombuffer(tensor.raw_data, np.int8)
                tensor.raw_data = np.roll(codes, 1).tobytes()
                break
        return built

    monkeypatch.setattr(ir_exporter, "build_onnx", wrong)
    with pytest.raises(VerificationError, match="OpenVINO does not compute what") as refused:
        export("openvino", deployment("residual"), tmp_path / "residual.xml")
    assert "the first layer that differs is Residual::Residual/Conv2d[conv1]" in str(
        refused.value
    )
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = ir_exporter.build_onnx

    def unknown(*args: object, **kwargs: object) -> BuiltOnnx:
        built = build(*args, **kwargs)  # type: ignore[arg-type]
        built.proto.graph.node[0].op_type = "Unknown"
        return built

    monkeypatch.setattr(ir_exporter, "build_onnx", unknown)
    with pytest.raises(VerificationError, match="OpenVINO cannot run it: "):
        export("openvino", deployment("residual"), tmp_path / "residual.xml")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_report_has_kernels_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the digits, which are seven bits without VNNI."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's (extra: examples)")
    speed = Speed(1.8, 1.75, 1.86, 7)
    monkeypatch.setattr(ir_exporter, "_speed", lambda session: speed)
    config = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
    config["tensor_quantize_config"]["weights"]["bit_width"] = WIDEST_IN_INT8
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "out"
    assert calibrate(folder, "--config_file", str(tmp_path / "config.json"), config=None) == 0
    gate = "openvino_int8_share==1"
    assert check(folder, "--deploy", "openvino", "--gate", gate) == 0
    assert "10 of 10 multiplications in int8; 1.8x" in capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    (summary,) = report["exports"]
    files = [folder / "export" / f"ResNet.{suffix}" for suffix in ("xml", "bin")]
    assert summary["bytes"] == sum(file.stat().st_size for file in files)
    assert [row["engine"] for row in summary["checks"]] == [
        "OpenVINO, default settings",
        "OpenVINO, in float32",
    ]
