"""A program of its own that runs `model.onnx` in OpenVINO, which on some files ends the process that runs it.

It reads `inputs.npz` and writes `outputs.npz`, by the names of tensors, in the folder that it is started in; with
`--defaults` also `defaults.npz`, from OpenVINO's own settings. Imports nothing of this package, so that it starts at
once.
"""

import sys
from collections.abc import Mapping

import numpy as np
import openvino

EXACT: Mapping[str, str | int] = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""It is asked how the file is read, and not how coarsely it is computed: without these settings OpenVINO computes in
bfloat16 where a processor can, and otherwise rounds what meets 8-bit weights in float to 8 bits, in groups.
"""


def main() -> None:
    """Run the model on one call and store what it gives."""
    core = openvino.Core()
    known = set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))
    store("outputs.npz", core, {name: value for name, value in EXACT.items() if name in known})
    if "--defaults" in sys.argv:
        store("defaults.npz", core, {})


def store(path: str, core: openvino.Core, settings: Mapping[str, str | int]) -> None:
    """Store the outputs of the model that is compiled with these settings."""
    compiled = core.compile_model("model.onnx", "CPU", dict(settings))
    with np.load("inputs.npz") as stored:
        found = compiled({name: stored[name] for name in (value.get_any_name() for value in compiled.inputs)})
    arrays = {}
    for value in compiled.outputs:
        for name in value.get_names():
            arrays[name] = found[value]
    np.savez(path, **arrays)


if __name__ == "__main__":
    main()
