"""Writes and reads the .safetensors target: codes, scales and zero points by layer name."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from quantizer.export.exporter import Exporter
from quantizer.nn.load import packed_codes, unpacked_codes
from quantizer.nn.network import Network
from quantizer.numerics.codes import bits_of, decode
from quantizer.numerics.formats import has_minimum
from quantizer.storage.deferred_tensor import DeferredTensor, loaded
from quantizer.storage.files import deferred_tensors, write_tensors
from quantizer.storage.safetensors_file import read_metadata

_FORMAT = 3
_BYTE = 8
_FEW_BITS = (
    "no engine runs weights of fewer than 8 bits from this file: it stores them for your code; "
    "the destination onnx makes a file with 8 bits for ONNX Runtime"
)
_REMEDY = "run <--deploy safetensors> again"
_CORRECTION = ".bias_correction"
# safetensors writes several keys in any order, so there is only one.
_METADATA_KEY = "quantizer"
_DAMAGE_ERRORS = (LookupError, TypeError, ValueError, AttributeError)
"""What a description raises that this exporter has not written."""


class SafetensorsExporter(Exporter[Path]):
    """Writes every parameter under `<layer>.<parameter>`, a quantized one as codes.

    Codes take the smallest dtype that holds them. Those of fewer than 8 bits are one stream of
    bits (`numerics.codes.pack`). With them are `.scale`, in the shape of
    `granularity.scale_shape`, and `.zero_point`. Activations have `<layer>.<role>.scale` and
    `.zero_point` only. Dynamic activations have neither, and floating-point formats have no
    zero point. `<layer>.bias_correction` is added to the layer's bias, or is the bias where
    there is none.

    The metadata's `quantizer` is JSON with six keys. `format`, `model` and `origin` describe
    the file. `specs` has the `QuantizationSpec` of each quantized tensor by its name. `shapes`
    and `dtypes` are of the parameters that are stored as codes: their shapes, and the dtypes in
    which test mode computes with them.
    """

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[Path]:
        """Write the file; see the class."""
        solution = deployment.encoded
        uncorrected = replace(solution, corrections={})
        tensors = _parameters(quantized_network(deployment.graph, uncorrected))
        specs: dict[str, Any] = {}
        shapes: dict[str, list[int]] = {}
        dtypes: dict[str, str] = {}
        for (layer, role), tensor in solution.tensors.items():
            name = f"{layer}.{parameter_name(role)}"
            spec = tensor.spec
            specs[name] = spec.to_json()
            if spec.has_stored_scale:
                tensors[f"{name}.scale"] = tensor.scale
                if spec.dtype == "int" or has_minimum(spec.dtype):
                    tensors[f"{name}.zero_point"] = tensor.zero_point
            if tensor.codes is not None:
                tensors[name] = packed_codes(tensor.codes, spec)
                shapes[name] = list(tensor.codes.shape)
                dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        for layer, correction in solution.corrections.items():
            tensors[f"{layer}{_CORRECTION}"] = correction
        description = {
            "format": _FORMAT,
            "model": deployment.graph.model,
            "origin": json.loads(deployment.origin.text()),
            "specs": specs,
            "shapes": shapes,
            "dtypes": dtypes,
        }
        text = json.dumps(description, sort_keys=True)
        write_tensors(path, tensors, {_METADATA_KEY: text})
        yield path

    def verify(self, deployment: Deployment, written: Path) -> Verification:
        """Compare the parameters of `load` with test mode's."""
        expected = _parameters(deployment.network())
        decoded = _decoded(written)
        # Generators: only one pair of tensors is in memory at a time.
        stored = (decoded[name].load() for name in expected)
        verification = verify("parameters", map(loaded, expected.values()), stored)
        widths = [bits_of(tensor.spec) for tensor in deployment.solution.tensors.values()]
        if min(widths, default=_BYTE) >= _BYTE:
            return verification
        return replace(verification, remarks=(*verification.remarks, _FEW_BITS))


def load(path: Path) -> dict[str, Tensor]:
    """Return the parameters of a file as test mode uses them, by `<layer>.<parameter>`.

    A quantized one is (code - zero_point) * scale.

    Raises:
        ResultError: the file is missing, damaged, or not written by this exporter.
    """
    return {name: tensor.load() for name, tensor in _decoded(path).items()}


def _decoded(path: Path) -> dict[str, DeferredTensor]:
    """Return the parameters of a file, each decoded when it is needed.

    Raises:
        ResultError: see `load`.
    """
    tensors = deferred_tensors(path)
    metadata = read_metadata(path)
    text = metadata.get(_METADATA_KEY, "{}")
    try:
        return _described(path, tensors, json.loads(text))
    except _DAMAGE_ERRORS as error:
        why = f"{path} has a damaged description: {type(error).__name__}: {error}"
        raise ResultError(why, help=_REMEDY) from error


def _described(
    path: Path, tensors: Mapping[str, DeferredTensor], description: Any
) -> dict[str, DeferredTensor]:
    """Return the parameters that a description finds in a file's tensors."""
    if description.get("format") != _FORMAT:
        raise ResultError(f"{path} is not a deployed network of this version", help=_REMEDY)
    specs: dict[str, QuantizationSpec] = {}
    parameters = dict(tensors)
    coded: dict[str, Tensor] = dict(tensors)
    for name, spec in description["specs"].items():
        specs[name] = QuantizationSpec(**spec)
        parameters.pop(f"{name}.scale", None)
        parameters.pop(f"{name}.zero_point", None)
    for name, dtype_name in description["dtypes"].items():
        dtype = getattr(torch, dtype_name)
        shape = description["shapes"][name]
        try:
            coded[name] = unpacked_codes(tensors[name], specs[name], shape)
        except ValueError as error:
            raise ResultError(f"{path}: {name}: {error}", help=_REMEDY) from error
        decode_now = partial(_decode_parameter, coded, name, specs[name], dtype)
        parameters[name] = DeferredTensor(shape, dtype, decode_now)
    for name in list(parameters):
        if not name.endswith(_CORRECTION):
            continue
        correction = parameters.pop(name)
        bias_name = f"{name.removesuffix(_CORRECTION)}.bias"
        add_now = partial(_sum, parameters.get(bias_name), correction)
        parameters[bias_name] = DeferredTensor(correction.shape, correction.dtype, add_now)
    return parameters


def _decode_parameter(
    tensors: Mapping[str, Tensor], name: str, spec: QuantizationSpec, dtype: torch.dtype
) -> Tensor:
    scale = loaded(tensors.get(f"{name}.scale", torch.ones(())))
    none = torch.zeros_like(scale, dtype=torch.int32)
    zero_point = loaded(tensors.get(f"{name}.zero_point", none))
    return decode(loaded(tensors[name]), spec, scale, zero_point, dtype=dtype)


def _sum(bias: DeferredTensor | None, correction: DeferredTensor) -> Tensor:
    """Return a bias with its correction."""
    return correction.load() if bias is None else bias.load() + correction.load()


def _parameters(network: Network) -> dict[str, Tensor]:
    """Return the parameters and buffers of each layer, except those of its quantizers."""
    parameters = {}
    for layer, module in network.layers.items():
        for key, tensor in module.state_dict().items():
            if not key.startswith("quantizers."):
                parameters[f"{layer}.{key}"] = tensor.detach()
    return parameters
