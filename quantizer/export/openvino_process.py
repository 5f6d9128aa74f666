"""A process of its own that runs an .onnx in OpenVINO, which on some files ends the process that runs it.

Called as `openvino_process.py MODEL INPUTS OUTPUTS`: the two last are .npz files by the names of tensors. Imports
nothing of this package, so that it starts at once.
"""

import sys

import numpy as np
import openvino


def main(model: str, inputs: str, outputs: str) -> None:
    """Run a model on one call and store what it gives."""
    # Float32 on every processor: it is asked how the file is read, and not how coarsely it is computed.
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    with np.load(inputs) as stored:
        found = compiled({name: stored[name] for name in (value.get_any_name() for value in compiled.inputs)})
    arrays = {}
    for value in compiled.outputs:
        for name in value.get_names():
            arrays[name] = found[value]
    np.savez(outputs, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
