"""Biases that no int32 holds in units of a layer's sums, or that have no such units, in a
default session.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.extended import extended, extended_except
from support.runs import ROOT
from torch import nn

import quantizer
from quantizer.cli.main import run_command

onnxruntime = pytest.importorskip(
    "onnxruntime", reason="it runs files of this target (extra: onnx)"
)
LAYERS = {
    "conv2d": lambda: (nn.Conv2d(4, 4, 1), (8, 4, 3, 3)),
    "conv_transpose2d": lambda: (nn.ConvTranspose2d(4, 4, 1), (8, 4, 3, 3)),
    "linear": lambda: (nn.Linear(4, 4), (8, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["per_channel", *extended("per_tensor")])
@pytest.mark.parametrize("kind", extended_except(LAYERS, "conv_transpose2d", "linear"))
def test_a_bias_far_above_16_bit_products_is_added_in_full(
    kind: str, granularity: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]()
    nn.init.constant_(layer.bias, 3.0)
    axis = (
        {"ch_axis": 1 if kind == "conv_transpose2d" else 0}
        if granularity == "per_channel"
        else {}
    )
    tensors = {
        "weight": {"dtype": "int16", "qscheme": granularity, **axis},
        "input_tensors": {"dtype": "int16"},
        "output_tensors": {"dtype": "uint8", "symmetric": False},
    }
    batch = torch.randn(shape) * 0.01
    result = quantizer.calibrate(
        nn.Sequential(layer), {"global_quant_config": tensors}, [batch]
    )
    result.export("onnx", tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(
        str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found), result.network(batch).detach(), rtol=0, atol=0.02
    )


@pytest.mark.slow
def test_next_to_nothing_has_no_unit_of_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The product of both scales is zero in float32, as it is in deep networks that nobody
    trained.
    """
    (tmp_path / "small.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def model():\n    torch.manual_seed(0)\n    layers = [nn.Conv2d(4, 4, 1) for _ in "
        "range(3)]\n"
        "    for layer in layers:\n        nn.init.normal_(layer.weight, 0, 1e-14)\n"
        "        nn.init.zeros_(layer.bias)\n"
        "    return nn.Sequential(*layers).eval()\n\n\n"
        "def calibration_data():\n    return [torch.randn(8, 4, 3, 3, "
        "generator=torch.Generator().manual_seed(0))]\n"
    )
    folder = ["--model", str(tmp_path / "small.py"), "--output_dir", str(tmp_path / "out")]
    config = ["--config_file", str(ROOT / "configs" / "cpu_int8.json")]
    assert run_command(["--quant_mode", "calib", *config, *folder]) == 0
    assert run_command(["--quant_mode", "test", "--deploy", "onnx", *folder]) == 0, (
        capsys.readouterr().err
    )
    assert "100.00% are equal" in capsys.readouterr().out
