"""A program of its own that runs `model.onnx` in OpenVINO, which on some files ends the process that runs it.

It reads `inputs.npz` and writes `outputs.npz`, by the names of tensors, in the folder that it is started in. Imports
nothing of this package, so that it starts at once.
"""

import numpy as np
import openvino


def main() -> None:
    """Run the model on one call and store what it gives."""
    # Float32 on every processor: it is asked how the file is read, and not how coarsely it is computed.
    compiled = openvino.Core().compile_model("model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    with np.load("inputs.npz") as stored:
        found = compiled({name: stored[name] for name in (value.get_any_name() for value in compiled.inputs)})
    arrays = {}
    for value in compiled.outputs:
        for name in value.get_names():
            arrays[name] = found[value]
    np.savez("outputs.npz", **arrays)


if __name__ == "__main__":
    main()
