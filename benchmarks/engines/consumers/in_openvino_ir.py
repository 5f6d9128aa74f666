"""Runs `model.xml` in OpenVINO by its default settings."""

from __future__ import annotations

from typing import Any

import openvino
import work_folder
from in_openvino import kernels, opened


def main() -> None:
    """Run, count kernels and measure times."""
    folder = work_folder.folder()
    compiled = opened(folder / "model.xml")
    values = work_folder.inputs()
    results = compiled(values)
    outputs = [results[value] for value in compiled.outputs]
    facts: dict[str, Any] = {"version": openvino.__version__.partition("-")[0]}
    facts |= kernels(compiled)
    floating = opened(folder / "float.onnx")
    facts |= work_folder.times(lambda: compiled(values), lambda: floating(values))
    work_folder.finish(outputs, facts)


if __name__ == "__main__":
    main()
