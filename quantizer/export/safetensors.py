"""The .safetensors target: integer codes, scales and zero points by layer name. Holds no graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.files import read_tensors, write_tensors
from quantizer.engine.solution import with_weights
from quantizer.errors import ResultError
from quantizer.export.deployment import Deployment, Verification, verify
from quantizer.nn.network import Network
from quantizer.numerics.fake_quantize import dequantize, quantize
from quantizer.numerics.formats import FLOAT_FORMATS

FORMAT = 1
CORRECTION = ".bias_correction"
METADATA = "quantizer"
"""The one key of the metadata: safetensors writes several in any order."""


def export(deployment: Deployment, path: Path) -> Verification:
    """Write every parameter under `<layer>.<parameter>`; a quantized one as codes, with `.scale` and `.zero_point`.

    Codes take the smallest integer dtype that holds the grid, so 4-bit codes take a byte each. Activations have
    `<layer>.<role>.scale` and `.zero_point` only. `<layer>.bias_correction` is added to the layer's bias, or is the
    bias where there is none. The metadata's `quantizer` is JSON: `format`, `model` and `specs`, the `QuantizationSpec`
    of each quantized tensor by its name. The parameters of `load` equal test mode's.
    """
    tensors, specs = _contents(deployment)
    described = {"format": FORMAT, "model": deployment.graph.model, "specs": specs}
    write_tensors(path, tensors, {METADATA: json.dumps(described, sort_keys=True)})
    expected, found = _parameters(deployment.network()), load(path)
    return verify("parameters", list(expected.values()), [found[name] for name in expected])


def load(path: Path) -> dict[str, Tensor]:
    """The parameters of a file as test mode uses them, (code - zero_point) * scale, by `<layer>.<parameter>`.

    Raises:
        ResultError: the file is missing, damaged, or not written by this exporter.
    """
    tensors = read_tensors(path)
    with safe_open(path, "pt") as file:
        described = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    if described.get("format") != FORMAT:
        raise ResultError(f"{path} is not a deployed network of this version", help="run --deploy safetensors again")
    specs = {name: QuantizationSpec(**spec) for name, spec in described["specs"].items()}
    scales = {f"{name}.{part}" for name in specs for part in ("scale", "zero_point")}
    parameters = {}
    for name in tensors.keys() - scales:
        spec, tensor = specs.get(name), tensors[name]
        if spec is None or spec.dtype != "int":
            parameters[name] = tensor if spec is None else tensor.float()
            continue
        parameters[name] = dequantize(tensor, tensors[f"{name}.scale"], tensors[f"{name}.zero_point"], spec.ch_axis)
    for name in [name for name in parameters if name.endswith(CORRECTION)]:
        bias, correction = f"{name.removesuffix(CORRECTION)}.bias", parameters.pop(name)
        parameters[bias] = parameters[bias] + correction if bias in parameters else correction
    return parameters


def _contents(deployment: Deployment) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The file's tensors and the specs by tensor name."""
    tensors = _parameters(Network(with_weights(deployment.graph, deployment.solution.weights)))
    specs: dict[str, Any] = {}
    for (layer, role), (spec, scale, zero_point) in deployment.solution.tensors.items():
        name = f"{layer}.{parameter_name(role)}"
        specs[name] = spec.to_json()
        if spec.dtype == "int":
            tensors |= {f"{name}.scale": scale, f"{name}.zero_point": zero_point}
        if is_parameter(role):
            tensors[name] = _stored(tensors[name], spec, scale, zero_point)
    corrections = {f"{layer}{CORRECTION}": tensor for layer, tensor in deployment.solution.corrections.items()}
    return tensors | corrections, specs


def _stored(parameter: Tensor, spec: QuantizationSpec, scale: Tensor, zero_point: Tensor) -> Tensor:
    """A parameter's codes, or its values in the floating-point format of its spec."""
    if spec.dtype != "int":
        row = FLOAT_FORMATS[spec.dtype]
        return parameter.clamp(-row.largest, row.largest).to(row.storage)
    return quantize(parameter, scale, zero_point, spec.quant_min, spec.quant_max, spec.round_mode, ch_axis=spec.ch_axis)


def _parameters(network: Network) -> dict[str, Tensor]:
    """Parameters and buffers of each layer, its quantizers' aside."""
    return {
        f"{layer}.{key}": tensor.detach()
        for layer, module in network.layers.items()
        for key, tensor in module.state_dict().items()
        if not key.startswith("quantizers.")
    }
