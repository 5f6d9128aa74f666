"""The content of a report that shows every section of the page, made from that of a test."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

LOST = "0.scores is 0 everywhere in the quantized network"


class Net(nn.Module):
    """A network whose two layers have names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().mean((2, 3)))


def export(**others: Any) -> dict[str, Any]:
    """Return a file as report.json has it."""
    speed = {
        "ratio": 1.31,
        "low": 1.2,
        "high": 1.4,
        "rounds": 7,
        "is_clear": True,
        "text": "1.3x the speed of float (1.2 to 1.4 in 7 rounds)",
    }
    checks = [
        {"engine": "ONNX Runtime, default settings", "agrees": True, "text": "all are equal"},
        {"engine": "OpenVINO 2026.4", "agrees": False, "text": "0.1 dB"},
    ]
    kernels = {
        "integer": 9,
        "count": 10,
        "share": 0.9,
        "multiply_add_share": 0.75,
        "text": "9 of 10 multiplications in int8, 75 % of the multiply-adds",
        "floating": {"Net::fc": "its output is in 16 bits"},
        "is_run": True,
    }
    made = {
        "file": "Net.onnx",
        "target": "onnx",
        "bytes": 7_800,
        "checks": checks,
        "remarks": ["8-bit weights are stored as uint8"],
        "kernels": kernels,
        "speed": speed,
    }
    return made | others


def whole(tested: dict[str, Any]) -> dict[str, Any]:
    """Return a tested report with a file, a warning, an algorithm, an analysis, marked rows and
    outputs in parts.
    """
    content = copy.deepcopy(tested)
    layer, other = (row["layer"] for row in content["layers"][:2])
    content["layers"][0] |= {"local_sqnr_db": 20.0, "bits": 8}
    content["layers"][1] |= {"local_sqnr_db": 4.0, "bits": 4}
    content["exports"] = [export()]
    content["warnings"] = [
        {"kind": "constant", "output": "0.scores", "text": LOST, "layer": layer, "tensor": ""}
    ]
    output = content["outputs"][0]
    content["outputs"].append(output | {"name": "0.scores", "index": "0[4:7]", "sqnr_db": 0.0})
    error = {"error": 0.001, "error_rtn": 0.01, "is_rtn": False}
    content["algorithms"] = {
        "algorithms": [{"name": "gptq"}],
        "rounded": {layer: error, other: error},
        "remarks": [{"layer": layer, "text": "its channels are sorted"}],
    }
    size = {"weight_bytes": 1000, "predicted_db": 20.0}
    content["analysis"] = {
        "layers": [{"layers": [layer], "weights": 100, "noise": {"4": 0.1, "8": 0.001}}],
        "curve": [size, size | {"weight_bytes": 2000, "predicted_db": 40.0}],
        "uniform": {"4": size, "8": size | {"weight_bytes": 2000, "predicted_db": 39.0}},
        "tensors": {
            "output_sqnr_db": 30.0,
            "noise_floor_db": 0.1,
            "tensors": [
                {"layer": layer, "tensor": "weights", "alone_db": 33.0, "gain_db": 3.0}
            ],
        },
    }
    return content
