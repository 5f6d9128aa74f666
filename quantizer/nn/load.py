"""Fill a generated network from weights.safetensors and quant_info.json in its folder. Only
data is read, never code.
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
from quantizer.nn.layer import Layer, channels_first
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.codes import pack, packed_shape, storage_dtype, unpack
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.files import deferred_shards, tensor_files_of
from quantizer.storage.opened_files import (
    FileSetKind,
    OpenedFiles,
    OpenFile,
    json_digest,
    open_files,
)

WEIGHTS_FILE = "weights.safetensors"
CORRECTIONS = "bias_corr.safetensors"
GROUP_SCALES = "qparams.safetensors"
"""The file with scales and zero points of groups, by `<module>.<role>.scale` and `.zero_point`.

Scales are float32, or packed to fewer bits by `numerics.two_level`, and then may have a
`.global_scale`.
"""
INFO_FILE = "quant_info.json"
_FILES_OF_TENSORS = (WEIGHTS_FILE, CORRECTIONS, GROUP_SCALES)
_KIND = FileSetKind(
    INFO_FILE,
    changed="was changed after calibration",
    missing="calibrate first",
    again="calibrate again",
)


def load(network: nn.Module, file: str) -> None:
    """Give a generated network its parameters and quantizers, as test mode runs it.

    Raises:
        ResultError: the folder of `file` has no calibration, or a file of it was changed.
    """
    opened = open_files(Path(file).parent, _KIND, _digests)
    info = _info(opened[INFO_FILE])
    weights = _load_tensors(opened, WEIGHTS_FILE)
    stored = weights | _load_tensors(opened, GROUP_SCALES)
    corrections = _load_tensors(opened, CORRECTIONS)
    modules: dict[str, Layer] = {
        name: module for name, module in network.named_children() if isinstance(module, Layer)
    }
    quantized = []
    for roles in info["tensors"].values():
        for role, entry in roles.items():
            tensor = quantized_tensor(entry, role, stored)
            quantized.append((entry, role, tensor))
            if tensor.codes is not None:
                weights[f"{entry['module']}.{parameter_name(role)}"] = tensor.decoded()
    for key, value in weights.items():
        name, _, attribute = key.partition(".")
        layer = modules[name]
        is_buffer = attribute in layer._buffers
        new_value = value if is_buffer else nn.Parameter(value, requires_grad=False)
        setattr(layer, attribute, new_value)
    for entry, role, tensor in quantized:
        attach_quantizer(modules[entry["module"]], role, tensor, inplace=entry["inplace"])
    for name, correction in corrections.items():
        first_entry = next(iter(info["tensors"][name].values()))
        modules[first_entry["module"]].correct_bias(correction)
    network.register_forward_hook(_channels_first)
    network.eval()


def _info(file: OpenFile) -> dict[str, Any]:
    """Return the content of quant_info.json.

    Raises:
        ResultError: it was changed after calibration.
    """
    try:
        info: dict[str, Any] = json.loads(file.content())
        content = {"header": info["header"], "tensors": info["tensors"]}
        is_whole = info["checksum"] == json_digest(content)
    except (ValueError, LookupError, TypeError):
        is_whole = False
    if not is_whole:
        raise ResultError(f"{file.path} {_KIND.changed}", help=_KIND.again)
    return info


def _digests(index: OpenFile) -> dict[str, str]:
    """Return the sha256 of each file of tensors from which a network is filled."""
    files = _info(index)["header"]["files"]
    digests: dict[str, str] = {}
    for name in _FILES_OF_TENSORS:
        for shard in tensor_files_of(name, files):
            digests[shard] = files[shard]
    return digests


def _load_tensors(opened: OpenedFiles, name: str) -> dict[str, Tensor]:
    """Return the tensors of `name`, which may be split into several files."""
    return {key: tensor.load() for key, tensor in deferred_shards(name, opened).items()}


def _channels_first(network: nn.Module, args: Any, output: Any) -> Any:
    """Return a network's output in the model's order of memory. It is a module-level function,
    as networks are pickled.
    """
    return channels_first(output)


def quantized_tensor(
    entry: Mapping[str, Any], role: str, stored: Mapping[str, Tensor]
) -> QuantizedTensor:
    """Return a tensor of quant_info.json. `stored` has the content of WEIGHTS and GROUP_SCALES:
    parameters or their codes, and scales of groups.
    """
    spec = QuantizationSpec(**entry["spec"])
    name = f"{entry['module']}.{role}"
    scale = torch.ones(())
    zero_point = None
    if "scales_in" in entry:
        global_scale = stored.get(f"{name}.global_scale")
        # Only scales of few bits need it
        from quantizer.numerics.two_level import unpack_scales

        scale = unpack_scales(stored[f"{name}.scale"], spec.scale_type, global_scale)
        zero_point = stored.get(f"{name}.zero_point")
    elif "scale" in entry:
        scale = torch.tensor(entry["scale"], dtype=torch.float32)
        if "zero_point" in entry:
            zero_point = torch.tensor(entry["zero_point"], dtype=torch.int32)
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    tensor = QuantizedTensor(spec, scale, zero_point)
    if "codes" not in entry:
        return tensor
    parameter = stored[f"{entry['module']}.{parameter_name(role)}"]
    codes = unpacked_codes(parameter, spec, entry["codes"]["shape"])
    return replace(tensor, codes=codes, dtype=getattr(torch, entry["codes"]["dtype"]))


def packed_codes(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    """Return codes as files store them. Deferred codes stay deferred."""
    if not isinstance(codes, DeferredTensor):
        return pack(codes, spec)
    shape = packed_shape(codes.shape, spec)
    dtype = codes.dtype if shape == codes.shape else torch.uint8
    return DeferredTensor(shape, dtype, lambda: pack(codes.load(), spec))


def unpacked_codes(stored: Tensor, spec: QuantizationSpec, shape: Sequence[int]) -> Tensor:
    """Return the codes that a file stores. Deferred ones are unpacked when they are needed.

    Raises:
        ValueError: the file has another number of them.
    """
    size = torch.Size(shape)
    packed = packed_shape(size, spec)
    if stored.shape != packed:
        raise ValueError(
            f"the codes of a tensor of {tuple(shape)} are stored as {tuple(packed)}, not "
            f"{stored.shape}"
        )
    if not isinstance(stored, DeferredTensor):
        return unpack(stored, spec, size)
    return DeferredTensor(shape, storage_dtype(spec), lambda: unpack(stored.load(), spec, size))


def attach_quantizer(
    layer: Layer, role: str, tensor: QuantizedTensor, *, inplace: bool
) -> None:
    """Give a layer the quantizer of a tensor. A parameter is quantized at once, unless its
    value already is that of its codes.
    """
    quantizer = TensorQuantizer.of(tensor, inplace=inplace)
    if tensor.codes is None:
        layer.attach(role, quantizer)
    else:
        layer.quantizers[role] = quantizer
