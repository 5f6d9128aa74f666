"""Runs a network with its encodings in aimet-onnx, as a program of its own: it brings another
ONNX Runtime and other versions of packages.

It works in the folder that it is started in. It reads `model.onnx`, `model.encodings` and
`inputs.npz`, and writes the outputs by name to `outputs.npz`. It imports nothing of this
package.
"""

from pathlib import Path

import aimet_onnx.common.quantsim_config as configs
import numpy as np
import onnx
from aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim

_CONFIG = "default_config_per_channel.json"


def main() -> None:
    """Load the encodings into a simulation, run one call and store its outputs."""
    model = onnx.load("model.onnx")
    names = [value.name for value in model.graph.output]
    config = Path(str(configs.__file__)).with_name(_CONFIG)
    simulation = QuantizationSimModel(model, config_file=str(config))
    # Tensors without encodings stay float.
    load_encodings_to_sim(simulation, "model.encodings", strict=False)
    with np.load("inputs.npz") as inputs:
        feed = dict(inputs)
    results = simulation.session.run(None, feed)
    outputs = dict(zip(names, results, strict=True))
    np.savez("outputs.npz", **outputs)


if __name__ == "__main__":
    main()
