"""A program of its own that runs `model.onnx` in OpenVINO, which on some files ends the process
that runs it.

It reads `inputs.npz` and `runs.json`, which has the settings of each run by the file to write,
in the folder that it is started in. A file has the outputs by the names of tensors. Imports
nothing of this package, so that it starts at once.
"""

import json
from pathlib import Path

import numpy as np
import openvino


def main() -> None:
    """Run the model on one call with all settings and store what it gives."""
    core = openvino.Core()
    known = set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))
    for path, settings in json.loads(Path("runs.json").read_text("utf-8")).items():
        compiled = core.compile_model(
            "model.onnx", "CPU", {name: settings[name] for name in settings if name in known}
        )
        with np.load("inputs.npz") as stored:
            found = compiled(
                {
                    name: stored[name]
                    for name in (value.get_any_name() for value in compiled.inputs)
                }
            )
        arrays = {}
        for value in compiled.outputs:
            for name in value.get_names():
                arrays[name] = found[value]
        np.savez(path, **arrays)


if __name__ == "__main__":
    main()
