"""A solution as the result folder has it: files of tensors, and what a header says of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_name
from quantizer.graph.edits import Insertion
from quantizer.nn.load import CORRECTIONS, GROUP_SCALES, WEIGHTS_FILE, quantized_tensor
from quantizer.nn.network import Network
from quantizer.numerics.codes import pack, packed_shape
from quantizer.numerics.two_level import pack_scales
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.opened_files import OpenedFiles
from quantizer.storage.tensor_shards import deferred_shards

RESCALED = "rescaled.safetensors"
"""Float parameters that are as good as the model's, by `<module>.<parameter>`, where `WEIGHTS`
has codes or others.
"""
TENSOR_FILES = (WEIGHTS_FILE, CORRECTIONS, GROUP_SCALES, RESCALED)


def tensors_of(network: Network, found: Solution) -> dict[str, dict[str, Tensor]]:
    """The files that a solution needs, each tensor by its name there; parameters that have
    codes are these, packed.
    """
    modules = network.module_names
    weights, scales = dict(network.state_dict()), dict[str, Tensor]()
    for (layer, role), tensor in found.tensors.items():
        spec, name = tensor.spec, f"{modules[layer]}.{role}"
        if tensor.codes is not None:
            weights[f"{modules[layer]}.{parameter_name(role)}"] = _packed(tensor.codes, spec)
        if spec.qscheme == "per_group" and not spec.is_dynamic:  # too much for quant_info.json
            parts = pack_scales(tensor.scale, spec.scale_type)
            scales |= {f"{name}.{part}": stored for part, stored in parts.items()}
            if spec.dtype == "int" and not spec.symmetric:
                scales[f"{name}.zero_point"] = tensor.zero_point
    rescaled = {
        f"{modules[name]}.{key}": tensor
        for name, own in found.rescaled.items()
        for key, tensor in own.items()
        if found.weights.get(name, {}).get(key) is not tensor  # else it is in WEIGHTS
    }
    others = {CORRECTIONS: dict(found.corrections), GROUP_SCALES: scales, RESCALED: rescaled}
    return {
        WEIGHTS_FILE: weights,
        **{name: tensors for name, tensors in others.items() if tensors},
    }


def _packed(codes: Tensor, spec: QuantizationSpec) -> Tensor:
    """Codes as a file holds them, made when they are written if they are not in memory."""
    if not isinstance(codes, DeferredTensor):
        return pack(codes, spec)
    shape = packed_shape(codes.shape, spec)
    return DeferredTensor(
        shape,
        codes.dtype if shape == codes.shape else torch.uint8,
        lambda: pack(codes.load(), spec),
    )


def header_of(network: Network, found: Solution) -> dict[str, Any]:
    """The header's entries on what algorithms and finetuning replaced."""
    modules = network.module_names
    checked: dict[str, Any] = {"absorption": found.absorption} if found.absorption else {}
    if found.levels:
        checked["levels"] = dict(found.levels)
    return checked | {
        "replaced": {
            name: {
                "module": modules[name],
                "weights": sorted(found.weights.get(name, ())),
                "rescaled": sorted(found.rescaled.get(name, ())),
            }
            for name in sorted({*found.weights, *found.rescaled})
        },
        "insertions": [
            {key: value for key, value in vars(row).items() if key != "weight"}
            | {"module": modules[row.name]}
            for row in found.insertions
        ],
        "algorithms": list(found.algorithms.get("algorithms", ())),
    }


def solution_of(
    opened: OpenedFiles, header: Mapping[str, Any], entries: Mapping[str, Any]
) -> Solution:
    """The inverse of `tensors_of` and `header_of`, its tensors deferred; `entries` are those of
    quant_info.json.

    Raises:
        KeyError, TypeError, ValueError: something is not there.
    """
    files = {name: deferred_shards(name, opened) for name in TENSOR_FILES}
    stored = files[WEIGHTS_FILE]

    def replaced(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        rows = {name: entry for name, entry in header["replaced"].items() if entry[kind]}
        return {
            name: {key: tensors[f"{row['module']}.{key}"] for key in row[kind]}
            for name, row in rows.items()
        }

    tensors = {
        (layer, role): quantized_tensor(entry, role, {**stored, **files[GROUP_SCALES]})
        for layer, roles in entries.items()
        for role, entry in roles.items()
    }
    insertions = []
    for row in header["insertions"]:
        weight = stored[f"{row['module']}.weight"]
        insertions.append(
            Insertion(
                row["name"],
                row["op"],
                row["source"],
                tuple(row["readers"]),
                weight,
                row["attrs"],
            )
        )
    return Solution(
        tensors,
        weights=replaced("weights", stored),
        corrections=files[CORRECTIONS],
        insertions=tuple(insertions),
        rescaled=replaced("rescaled", {**stored, **files[RESCALED]}),
        absorption=header.get("absorption", {}),
        levels=header.get("levels", {}),
    )
