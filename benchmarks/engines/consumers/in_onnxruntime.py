"""Runs `model.onnx` in a default session of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import work_folder

MULTIPLYING = (
    "Conv",
    "ConvTranspose",
    "FusedConv",
    "MatMul",
    "FusedMatMul",
    "Gemm",
    "FusedGemm",
    "LSTM",
    "GRU",
)
INTEGER = (
    "QLinearConv",
    "ConvInteger",
    "QLinearMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QGemm",
    "DynamicQuantizeMatMul",
    "MatMulNBits",
)


def main() -> None:
    """Run, count kernels and measure times."""
    session = opened(work_folder.folder() / "model.onnx")
    feed = named(session)
    outputs = session.run(None, feed)
    facts: dict[str, Any] = {"version": onnxruntime.__version__, **kernels()}
    floating = opened(work_folder.folder() / "float.onnx")
    float_feed = named(floating)
    facts |= work_folder.times(
        lambda: session.run(None, feed), lambda: floating.run(None, float_feed)
    )
    work_folder.finish(outputs, facts)


def opened(path: Path, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    """Return a session of one thread, which writes its optimized graph to a path if asked."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def named(session: onnxruntime.InferenceSession) -> dict[str, Any]:
    """Return the inputs by the names of the file."""
    names = [value.name for value in session.get_inputs()]
    return dict(zip(names, work_folder.inputs(), strict=True))


def kernels() -> dict[str, int]:
    """Return how many multiplications of the optimized graph are in integers, and of all."""
    path = work_folder.folder() / "optimized.onnx"
    opened(work_folder.folder() / "model.onnx", path)
    integer = 0
    floating = 0
    for node in onnx.load(path, load_external_data=False).graph.node:
        if node.op_type in INTEGER:
            integer += 1
        elif node.op_type in MULTIPLYING:
            floating += 1
    return {"integer": integer, "multiplications": integer + floating}


if __name__ == "__main__":
    main()
