"""The .safetensors target: codes, scales and zero points by layer name. Holds no graph."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import quantized_network
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_name
from quantizer.errors import ResultError
from quantizer.export.agreement import Verification, verify
from quantizer.export.deployment import Deployment
from quantizer.nn.network import Network
from quantizer.numerics.codes import decode
from quantizer.storage.deferred_tensor import DeferredTensor, loaded
from quantizer.storage.files import deferred_tensors, write_tensors
from quantizer.storage.safetensors_file import metadata

FORMAT = 2
CORRECTION = ".bias_correction"
METADATA = "quantizer"
"""The one key of the metadata: safetensors writes several in any order."""


def export(deployment: Deployment, path: Path) -> Verification:
    """Write every parameter under `<layer>.<parameter>`; a quantized one as codes, with
    `.scale` and `.zero_point`.

    Codes take the smallest dtype that holds them, so 4-bit codes take a byte each; scales have
    the shape of `granularity.scale_shape`. Activations have `<layer>.<role>.scale` and
    `.zero_point` only, dynamic ones neither, and floating-point formats have no zero point.
    `<layer>.bias_correction` is added to the layer's bias, or is the bias where there is none.
    The metadata's `quantizer` is JSON: `format`, `model`, `specs`, the `QuantizationSpec` of
    each quantized tensor by its name, and `dtypes`, in which test mode computes with each
    parameter stored as codes. The parameters of `load` equal test mode's.
    """
    solution = deployment.encoded
    tensors = _parameters(
        quantized_network(deployment.graph, replace(solution, corrections={}))
    )
    specs: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for (layer, role), tensor in solution.tensors.items():
        name, spec = f"{layer}.{parameter_name(role)}", tensor.spec
        specs[name] = spec.to_json()
        if spec.is_scaled and not spec.is_dynamic:
            tensors |= {f"{name}.scale": tensor.scale}
            tensors |= {f"{name}.zero_point": tensor.zero_point} if spec.dtype == "int" else {}
        if tensor.codes is not None:
            tensors[name], dtypes[name] = tensor.codes, str(tensor.dtype).removeprefix("torch.")
    tensors |= {
        f"{layer}{CORRECTION}": tensor for layer, tensor in solution.corrections.items()
    }
    described = {
        "format": FORMAT,
        "model": deployment.graph.model,
        "specs": specs,
        "dtypes": dtypes,
    }
    write_tensors(path, tensors, {METADATA: json.dumps(described, sort_keys=True)})
    expected, found = _parameters(deployment.network()), _decoded(path)
    return verify(
        "parameters", map(loaded, expected.values()), (found[name].load() for name in expected)
    )


def load(path: Path) -> dict[str, Tensor]:
    """The parameters of a file as test mode uses them, (code - zero_point) * scale, by
    `<layer>.<parameter>`.

    Raises:
        ResultError: the file is missing, damaged, or not written by this exporter.
    """
    return {name: tensor.load() for name, tensor in _decoded(path).items()}


def _decoded(path: Path) -> dict[str, DeferredTensor]:
    """The same, each made when it is needed."""
    tensors = deferred_tensors(path)
    described = json.loads(metadata(path).get(METADATA, "{}"))
    if described.get("format") != FORMAT:
        raise ResultError(
            f"{path} is not a deployed network of this version",
            help="run --deploy safetensors again",
        )
    specs = {name: QuantizationSpec(**spec) for name, spec in described["specs"].items()}
    parts = {f"{name}.{part}" for name in specs for part in ("scale", "zero_point")}
    parameters = {name: tensor for name, tensor in tensors.items() if name not in parts}

    def parameter(name: str, dtype: torch.dtype) -> Tensor:
        scale = loaded(tensors.get(f"{name}.scale", torch.ones(())))
        zero_point = loaded(
            tensors.get(f"{name}.zero_point", torch.zeros_like(scale, dtype=torch.int32))
        )
        return decode(tensors[name].load(), specs[name], scale, zero_point, dtype=dtype)

    for name, stored in described["dtypes"].items():
        dtype = getattr(torch, stored)
        parameters[name] = DeferredTensor(
            tensors[name].shape, dtype, partial(parameter, name, dtype)
        )
    for name in [name for name in parameters if name.endswith(CORRECTION)]:
        bias, correction = f"{name.removesuffix(CORRECTION)}.bias", parameters.pop(name)
        summands = [each for each in (parameters.get(bias), correction) if each is not None]
        parameters[bias] = DeferredTensor(
            correction.shape, correction.dtype, partial(_sum, summands)
        )
    return parameters


def _sum(summands: Sequence[DeferredTensor]) -> Tensor:
    """A bias with what corrects it."""
    first, *others = (each.load() for each in summands)
    return sum(others, start=first)


def _parameters(network: Network) -> dict[str, Tensor]:
    """Parameters and buffers of each layer, its quantizers' aside."""
    return {
        f"{layer}.{key}": tensor.detach()
        for layer, module in network.layers.items()
        for key, tensor in module.state_dict().items()
        if not key.startswith("quantizers.")
    }
