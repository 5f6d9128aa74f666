"""The same .onnx in OpenVINO: it loads, convolutions and linear layers run in integers, and
outputs are test mode's.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import ROOT, calibrate, check

ov = pytest.importorskip("openvino", reason="the consumer (extra: openvino)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
pytest.importorskip(
    "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
)

from support.generated import imported

from quantizer.sources.models import load_model

INTEGERS = {"u8", "i8"}


@pytest.mark.slow
def test_openvino_runs_it_in_integers(tmp_path: Path) -> None:
    folder, config = (
        tmp_path / "out",
        json.loads((ROOT / "configs" / "cpu_int8.json").read_text()),
    )
    if not torch.cpu._is_vnni_supported():
        # Of 8, ONNX Runtime adds up products wrong
        config["tensor_quantize_config"]["weights"]["bit_width"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert calibrate(folder, "--config_file", str(tmp_path / "config.json"), config=None) == 0
    assert check(folder, "--deploy", "onnx", "--onnx_weights", "int8") == 0
    compiled = ov.Core().compile_model(str(folder / "export" / "ResNet.onnx"), "CPU")
    layers = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    kinds = [
        (info["layerType"].astype(str), info["runtimePrecision"].astype(str)) for info in layers
    ]
    multiplying = [
        precision for layer, precision in kinds if layer in ("Convolution", "FullyConnected")
    ]
    assert len(multiplying) == 10
    assert set(multiplying) <= INTEGERS
    network = imported(folder / "ResNet.py")
    data = load_model(str(ROOT / "examples" / "digits.py")).evaluation_data
    assert data is not None
    agreeing, within, count = 0, 0, 0
    for images, _ in data():
        with torch.no_grad():
            expected = network(images).numpy()
        found = compiled(images.numpy())[0]
        agreeing += int((expected.argmax(1) == found.argmax(1)).sum())
        step = float(np.diff(np.unique(expected)).min())
        within += int((np.abs(expected - found) <= 1.01 * step).sum())
        count += len(images)
    assert agreeing == count
    assert within >= 0.97 * 10 * count  # its kernels round otherwise, by a step
