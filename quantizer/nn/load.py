"""Fills a generated network from weights.safetensors and quant_info.json beside it. Reads data,
never code.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_name
from quantizer.errors import ResultError
from quantizer.nn.image_layout import channels_first
from quantizer.nn.layer import Layer
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.codes import packed_shape, storage_dtype, unpack
from quantizer.numerics.two_level import unpack_scales
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.opened_files import (
    OpenedFiles,
    OpenFile,
    SetKind,
    json_digest,
    open_files,
)
from quantizer.storage.safetensors_file import deferred_file
from quantizer.storage.tensor_shards import shards_of

WEIGHTS, CORRECTIONS = "weights.safetensors", "bias_corr.safetensors"
GROUP_SCALES = "qparams.safetensors"
"""The file with scales and zero points of groups, by `<module>.<role>.scale` and `.zero_point`.

Scales are float32, or of fewer bits as `numerics.two_level` packs them, and then may have a
`.global_scale`.
"""

INFO = "quant_info.json"
FILES_OF_TENSORS = (WEIGHTS, CORRECTIONS, GROUP_SCALES)
"""The files that a generated network is filled from."""
_KIND = SetKind(
    INFO,
    changed="was changed after calibration",
    missing="run --quant_mode calib first",
    again="run --quant_mode calib again",
)


def load(network: nn.Module, file: str) -> None:
    """Give a generated network its parameters and quantizers, as test mode runs it.

    Raises:
        ResultError: the folder of `file` has no calibration, or a file of it was changed.
    """
    opened = open_files(Path(file).parent, _KIND, _digests)
    info = _info(opened[INFO])
    files = {name: _loaded(opened, name) for name in FILES_OF_TENSORS}
    weights, entries = (
        files[WEIGHTS],
        [row for own in info["tensors"].values() for row in own.items()],
    )
    stored = weights | files[GROUP_SCALES]
    found = [(entry, role, quantized_tensor(entry, role, stored)) for role, entry in entries]
    for entry, role, tensor in found:
        if tensor.codes is not None:
            weights[f"{entry['module']}.{parameter_name(role)}"] = tensor.decoded()
    modules = {
        name: layer for name, layer in network.named_children() if isinstance(layer, Layer)
    }
    for key, value in weights.items():
        name, _, attribute = key.partition(".")
        is_buffer = attribute in modules[name]._buffers
        setattr(
            modules[name],
            attribute,
            value if is_buffer else nn.Parameter(value, requires_grad=False),
        )
    for entry, role, tensor in found:
        attach(modules[entry["module"]], role, tensor, inplace=entry["inplace"])
    for name, correction in files[CORRECTIONS].items():
        modules[next(iter(info["tensors"][name].values()))["module"]].correct_bias(correction)
    network.register_forward_hook(_hand_out)
    network.eval()


def _info(file: OpenFile) -> dict[str, Any]:
    """The content of quant_info.json.

    Raises:
        ResultError: it was changed after calibration.
    """
    try:
        info: dict[str, Any] = json.loads(file.content())
        is_whole = info["checksum"] == json_digest(
            {"header": info["header"], "tensors": info["tensors"]}
        )
    except (ValueError, LookupError, TypeError):
        is_whole = False
    if not is_whole:
        raise ResultError(f"{file.path} {_KIND.changed}", help=_KIND.again)
    return info


def _digests(index: OpenFile) -> dict[str, str]:
    """The sha256 of each file of tensors that a network is filled from."""
    files = _info(index)["header"]["files"]
    return {
        shard: files[shard] for name in FILES_OF_TENSORS for shard in shards_of(name, files)
    }


def _loaded(opened: OpenedFiles, name: str) -> dict[str, Tensor]:
    """The tensors of `name`, which may lie in several files."""
    tensors: dict[str, Tensor] = {}
    for shard in shards_of(name, opened.names):
        deferred = deferred_file(opened[shard])
        tensors |= {key: tensor.load() for key, tensor in deferred.items()}
    return tensors


def _hand_out(network: nn.Module, args: Any, output: Any) -> Any:
    """What a network returns, in the order of memory of the model; a function, as networks are
    pickled.
    """
    return channels_first(output)


def quantized_tensor(
    entry: Mapping[str, Any], role: str, stored: Mapping[str, Tensor]
) -> QuantizedTensor:
    """A tensor of quant_info.json; `stored` has parameters and their codes, and what is in
    GROUP_SCALES.
    """
    spec, module, scale, zero_point = (
        QuantizationSpec(**entry["spec"]),
        entry["module"],
        torch.ones(()),
        None,
    )
    if "scales_in" in entry:
        name = f"{module}.{role}"
        scale = unpack_scales(
            stored[f"{name}.scale"], spec.scale_type, stored.get(f"{name}.global_scale")
        )
        zero_point = stored.get(f"{name}.zero_point")
    elif "scale" in entry:
        scale = torch.tensor(entry["scale"], dtype=torch.float32)
        zero_point = (
            torch.tensor(entry["zero_point"], dtype=torch.int32)
            if "zero_point" in entry
            else None
        )
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    found = QuantizedTensor(spec, scale, zero_point)
    if "codes" not in entry:
        return found
    codes = _unpacked(stored[f"{module}.{parameter_name(role)}"], spec, entry["codes"]["shape"])
    return replace(found, codes=codes, dtype=getattr(torch, entry["codes"]["dtype"]))


def _unpacked(stored: Tensor, spec: QuantizationSpec, shape: Sequence[int]) -> Tensor:
    """Codes as a file holds them, unpacked when they are needed if they are not in memory.

    Raises:
        ValueError: the file does not hold as many.
    """
    packed = packed_shape(torch.Size(shape), spec)
    if stored.shape != packed:
        raise ValueError(
            f"the codes of a tensor of {tuple(shape)} are stored as {tuple(packed)}, not "
            f"{stored.shape}"
        )
    if not isinstance(stored, DeferredTensor):
        return unpack(stored, spec, torch.Size(shape))
    return DeferredTensor(
        shape, storage_dtype(spec), lambda: unpack(stored.load(), spec, torch.Size(shape))
    )


def attach(layer: Layer, role: str, tensor: QuantizedTensor, *, inplace: bool) -> None:
    """Give a layer the quantizer of a tensor; a parameter is rounded at once, unless it is what
    its codes stand for.
    """
    quantizer = TensorQuantizer.of(tensor, inplace=inplace)
    if tensor.codes is None:
        layer.attach(role, quantizer)
    else:
        layer.quantizers[role] = quantizer
