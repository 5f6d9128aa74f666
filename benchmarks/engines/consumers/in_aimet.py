"""Runs `model.onnx` in AIMET, which reads the scales of a QDQ file into its own simulation."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import onnx
import work_folder
from aimet_onnx.quantsim import QuantizationSimModel


def main() -> None:
    """Run the simulation."""
    model = onnx.load(work_folder.folder() / "model.onnx")
    simulation = QuantizationSimModel.from_onnx_qdq(model)
    names = [value.name for value in simulation.session.get_inputs()]
    feed = dict(zip(names, work_folder.inputs(), strict=True))
    outputs = simulation.session.run(None, feed)
    facts: dict[str, Any] = {"version": version("aimet-onnx")}
    work_folder.finish(outputs, facts)


if __name__ == "__main__":
    main()
