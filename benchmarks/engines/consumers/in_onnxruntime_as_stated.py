"""Runs `model.onnx` in ONNX Runtime operator by operator, as it is for another engine."""

from __future__ import annotations

from typing import Any

import onnxruntime
import work_folder


def main() -> None:
    """Run without kernels of integers, which would round other values."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(
        work_folder.folder() / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    feed = dict(zip(names, work_folder.inputs(), strict=True))
    facts: dict[str, Any] = {"version": onnxruntime.__version__}
    work_folder.finish(session.run(None, feed), facts)


if __name__ == "__main__":
    main()
