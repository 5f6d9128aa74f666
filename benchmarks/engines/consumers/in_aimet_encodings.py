"""Loads `model.encodings` into AIMET's simulation of the network next to it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import onnx
import work_folder
from aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim


def main() -> None:
    """Run the simulation; tensors without encodings stay float."""
    folder = work_folder.folder()
    model = onnx.load(folder / "model.encodings.onnx")
    simulation = QuantizationSimModel(model, config_file="htp_v75")
    load_encodings_to_sim(simulation, str(folder / "model.encodings"), strict=False)
    names = [value.name for value in simulation.session.get_inputs()]
    feed = dict(zip(names, work_folder.inputs(), strict=True))
    outputs = simulation.session.run(None, feed)
    facts: dict[str, Any] = {"version": version("aimet-onnx")}
    work_folder.finish(outputs, facts)


if __name__ == "__main__":
    main()
