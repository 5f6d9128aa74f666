"""What the DPU computes in another way: only on the DPU, with its constants, and in the
generated code bit for bit.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from support.dpu_networks import Applied, example
from support.generated import imported
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.calibration.solution import quantized_network
from quantizer.cli.main import run_command
from quantizer.config.model import Settings
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.results.folder import read_info

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        y = F.leaky_relu(self.conv(x))
        y = F.hardswish(y) + F.hardsigmoid(y)
        y = F.avg_pool2d(y, 3, 1, 1)
        return self.fc(y.mean((2, 3)) + F.adaptive_avg_pool2d(y, 1).flatten(1))


def model():
    torch.manual_seed(0)
    return Mixed()


def calibration_data():
    return [torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
"""


def passed(module: nn.Module, x: Tensor, device: str = "DPU") -> Graph:
    return run_passes(trace(module.eval(), (x,)), Settings(target_device=device))


def on_dpu(function: object, x: Tensor) -> Tensor:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)  # type: ignore[operator, no-any-return]

    with torch.no_grad():
        return Network(passed(Plain(), x))(x)


AVERAGES = {
    "3x3": (lambda x: F.avg_pool2d(x, 3), 63 / 64),
    "5x5 with padding": (lambda x: F.avg_pool2d(x, 5, 2, 2), 250 / 256),
    "2x2": (lambda x: F.avg_pool2d(x, 2), 1.0),
    "global 7x7": (lambda x: F.adaptive_avg_pool2d(x, 1), 1029 / 1024),
    "mean": (lambda x: x.mean((2, 3)), 1029 / 1024),
    "mean, dimensions kept": (lambda x: x.mean([-1, -2], keepdim=True), 1029 / 1024),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_the_factor_times_the_mean(name: str) -> None:
    function, factor = AVERAGES[name]
    x = example(size=7)
    torch.testing.assert_close(on_dpu(function, x), function(x) * factor)


NOT_FIXED = {
    "padding that does not count": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "windows over the edge": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "windows of two sizes": lambda x: F.adaptive_avg_pool2d(x, 3),
    "a divisor of its own": lambda x: F.avg_pool2d(x, 3, divisor_override=2),
    "another axis": lambda x: x.mean((1, 2)),
}


@pytest.mark.parametrize("name", NOT_FIXED)
def test_averages_without_one_fixed_window_stay_as_they_are(name: str) -> None:
    x = example(size=7)
    assert torch.equal(on_dpu(NOT_FIXED[name], x), NOT_FIXED[name](x))


def test_leaky_relu_has_the_slope_26_256() -> None:
    assert on_dpu(lambda x: F.leaky_relu(x, 0.3), torch.tensor([-256.0, 3.0])).tolist() == [
        -26.0,
        3.0,
    ]


def test_hard_activations_have_the_integer_form() -> None:
    x = torch.tensor([-4.0, -3.0, -1.0, 0.0, 1.0, 3.0, 100.0])
    sixth = 2731 / 16384
    hardsigmoid = [min(max(v + 3, 0), 6) * sixth for v in x.tolist()]
    torch.testing.assert_close(on_dpu(F.hardsigmoid, x), torch.tensor(hardsigmoid))
    # In 8 bits at position 7: 2 * 2731 / 16384 = 42.67 / 128 is 43, one half is 64, and 6/6 is
    # cut to 127.
    gates = [0, 0, 43, 64, 85, 127, 127]
    expected = [v * g / 128 for v, g in zip(x.tolist(), gates, strict=True)]
    assert on_dpu(F.hardswish, x).tolist() == expected


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_other_devices_compute_what_the_model_computes(device: str) -> None:
    module = Applied(lambda y, x: F.hardswish(F.avg_pool2d(F.leaky_relu(y), 3)))
    with torch.no_grad():
        found, expected = (
            Network(passed(module, example(), device))(example()),
            module(example()),
        )
    # Sums are in another order on some processors
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_generated_code_equals_test_mode_and_deploys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(extra, reason="deploys to ONNX too (extra: onnx)")
    model, out = tmp_path / "mixed.py", tmp_path / "out"
    model.write_text(MODEL)
    run = ["--model", str(model), "--output_dir", str(out), "-q"]
    assert run_command(["--quant_mode", "calib", *run]) == 0
    deploy = ["--deploy", "onnx", "--deploy", "pt2", "--deploy", "safetensors"]
    assert (
        run_command(
            ["--quant_mode", "test", *run, "--exact", "--gate", "exact_equal>=1", *deploy]
        )
        == 0
    )
    shown = capsys.readouterr().out
    equal = shown.count("differ by at most 0, 100.00% are equal")
    assert equal - shown.count("in OpenVINO") == 4  # the ONNX file in both kinds of session
    info = read_info(out)
    source = runpy.run_path(str(model))
    graph = run_passes(trace(source["model"]().eval(), (example(),)), info.settings)
    text = (out / "Mixed.py").read_text()
    assert all(
        f"quantizer.nn.Dpu{word}(" in text for word in ("AvgPool2d", "Hardsigmoid", "Hardswish")
    )
    with torch.no_grad():
        assert torch.equal(
            imported(out / "Mixed.py")(example(9)),
            quantized_network(graph, info.solution)(example(9)),
        )
