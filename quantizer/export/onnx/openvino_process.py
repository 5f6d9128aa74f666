"""Runs `model.onnx` in OpenVINO, as a program of its own: some files crash its process.

It works in the folder that it is started in. It reads `inputs.npz`, and `runs.json` with the
settings of each run by the file to write. That file has the outputs by the names of tensors. It
imports nothing of this package, so that it starts at once.
"""

import json
from pathlib import Path

import numpy as np
import openvino


def main() -> None:
    """Run the model on one call with all settings and store its outputs."""
    core = openvino.Core()
    known = set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))
    for path, settings in json.loads(Path("runs.json").read_text("utf-8")).items():
        known_settings = {name: settings[name] for name in settings if name in known}
        compiled = core.compile_model("model.onnx", "CPU", known_settings)
        names = [value.get_any_name() for value in compiled.inputs]
        with np.load("inputs.npz") as inputs:
            results = compiled({name: inputs[name] for name in names})
        arrays = {}
        for value in compiled.outputs:
            for name in value.get_names():
                arrays[name] = results[value]
        np.savez(path, **arrays)


if __name__ == "__main__":
    main()
