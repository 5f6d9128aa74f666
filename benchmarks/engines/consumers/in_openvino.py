"""Runs `model.onnx` in OpenVINO by its default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino
import work_folder

MULTIPLYING = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "LSTMSeq")
INTEGERS = ("u8", "i8")


def main() -> None:
    """Run, count kernels and measure times."""
    compiled = opened(work_folder.folder() / "model.onnx")
    values = work_folder.inputs()
    results = compiled(values)
    outputs = [results[value] for value in compiled.outputs]
    facts: dict[str, Any] = {"version": openvino.__version__.partition("-")[0]}
    facts |= kernels(compiled)
    floating = opened(work_folder.folder() / "float.onnx")
    facts |= work_folder.times(lambda: compiled(values), lambda: floating(values))
    work_folder.finish(outputs, facts)


def opened(path: Path) -> Any:
    """Return the compiled model, which runs in one thread."""
    settings = {"INFERENCE_NUM_THREADS": 1}
    return openvino.Core().compile_model(str(path), "CPU", settings)


def kernels(compiled: Any) -> dict[str, int]:
    """Return how many multiplications of the compiled model are in integers, and of all."""
    integer = 0
    multiplications = 0
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if info["layerType"].astype(str) not in MULTIPLYING:
            continue
        multiplications += 1
        if info["runtimePrecision"].astype(str) in INTEGERS:
            integer += 1
    return {"integer": integer, "multiplications": multiplications}


if __name__ == "__main__":
    main()
