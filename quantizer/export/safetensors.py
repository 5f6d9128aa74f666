"""The .safetensors target: integer codes, scales and zero points by layer name. Holds no graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.result_files import read_tensors, write_tensors
from quantizer.errors import ResultError
from quantizer.export.agreement import Verification, verify
from quantizer.export.deployment import Deployment
from quantizer.graph.edits import with_weights
from quantizer.nn.network import Network
from quantizer.numerics.fake_cast import float_kernel
from quantizer.numerics.fake_quantize import dequantize, quantize
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.numerics.granularity import from_rows, to_rows

FORMAT = 1
CORRECTION = ".bias_correction"
METADATA = "quantizer"
"""The one key of the metadata: safetensors writes several in any order."""


def export(deployment: Deployment, path: Path) -> Verification:
    """Write every parameter under `<layer>.<parameter>`; a quantized one as codes, with `.scale` and `.zero_point`.

    Codes take the smallest dtype that holds the grid, so 4-bit codes take a byte each; scales have the shape of
    `granularity.scale_shape`. Activations have `<layer>.<role>.scale` and `.zero_point` only, dynamic ones neither, and
    floating-point formats have no zero point. `<layer>.bias_correction` is added to the layer's bias, or is the
    bias where there is none. The metadata's `quantizer` is JSON: `format`, `model`, `specs`, the `QuantizationSpec` of
    each quantized tensor by its name, and `dtypes`, in which test mode computes with each quantized parameter. The
    parameters of `load` equal test mode's.
    """
    tensors, specs, dtypes = _contents(deployment)
    described = {"format": FORMAT, "model": deployment.graph.model, "specs": specs, "dtypes": dtypes}
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
        if spec is None:
            parameters[name] = tensor
            continue
        dtype: torch.dtype = getattr(torch, described.get("dtypes", {}).get(name, "float32"))
        if spec.is_scaled:
            tensor = _restored(tensor, spec, tensors[f"{name}.scale"], tensors.get(f"{name}.zero_point"), dtype)
        parameters[name] = tensor.to(dtype)
    for name in [name for name in parameters if name.endswith(CORRECTION)]:
        bias, correction = f"{name.removesuffix(CORRECTION)}.bias", parameters.pop(name)
        parameters[bias] = parameters[bias] + correction if bias in parameters else correction
    return parameters


def _work(spec: QuantizationSpec, dtype: torch.dtype) -> torch.dtype:
    """What test mode rounds a product of code and scale to, before it rounds to the parameter's dtype."""
    return torch.float64 if dtype == torch.float64 or spec.quant_max - spec.quant_min >= 1 << 24 else torch.float32


def _contents(deployment: Deployment) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """The file's tensors, the specs by tensor name, and the dtypes of quantized parameters."""
    tensors = _parameters(Network(with_weights(deployment.graph, deployment.solution.weights)))
    specs: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for (layer, role), tensor in deployment.solution.tensors.items():
        spec, scale, zero_point = tensor.spec, tensor.scale, tensor.zero_point
        name = f"{layer}.{parameter_name(role)}"
        specs[name] = spec.to_json()
        if spec.is_scaled and not spec.is_dynamic:
            tensors |= {f"{name}.scale": scale}
            tensors |= {f"{name}.zero_point": zero_point} if spec.dtype == "int" else {}
        if is_parameter(role):
            dtypes[name] = str(tensors[name].dtype).removeprefix("torch.")
            tensors[name] = _stored(tensors[name], spec, scale, zero_point)
    corrections = {f"{layer}{CORRECTION}": tensor for layer, tensor in deployment.solution.corrections.items()}
    return tensors | corrections, specs, dtypes


def _stored(parameter: Tensor, spec: QuantizationSpec, scale: Tensor, zero_point: Tensor) -> Tensor:
    """A parameter's codes, or its values in the floating-point format of its spec before they are scaled."""
    if not spec.is_scaled:
        row = FLOAT_FORMATS[spec.dtype]
        largest = min(row.largest, torch.finfo(parameter.dtype).max)
        return parameter.clamp(-largest, largest).to(row.storage)
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    rows = to_rows(parameter, *cut)
    if spec.dtype == "int":
        each, low, high = (scale.reshape(-1), zero_point.reshape(-1)), spec.quant_min, spec.quant_max
        codes = quantize(rows, *each, low, high, spec.round_mode, ch_axis=0)
    else:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        codes = float_kernel(spec.dtype)(wide / scale.reshape(-1, 1), 0).to(FLOAT_FORMATS[spec.dtype].storage)
    return from_rows(codes, tuple(parameter.shape), *cut)


def _restored(
    codes: Tensor, spec: QuantizationSpec, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The inverse of `_stored`, up to a cast to the parameter's dtype."""
    cut = spec.qscheme, spec.ch_axis, spec.group_size
    if zero_point is not None:
        each = scale.reshape(-1), zero_point.reshape(-1)
        values = dequantize(to_rows(codes, *cut), *each, 0, _work(spec, dtype))
    else:
        work = torch.promote_types(dtype, torch.float32)
        values = to_rows(codes.to(work), *cut) * scale.reshape(-1, 1)
    return from_rows(values, tuple(codes.shape), *cut)


def _parameters(network: Network) -> dict[str, Tensor]:
    """Parameters and buffers of each layer, its quantizers' aside."""
    return {
        f"{layer}.{key}": tensor.detach()
        for layer, module in network.layers.items()
        for key, tensor in module.state_dict().items()
        if not key.startswith("quantizers.")
    }
