"""Convert a solution to the tensor files of a result folder and entries of its header, and
back.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.roles import parameter_name
from quantizer.graph.edits import Insertion
from quantizer.nn.load import (
    CORRECTIONS,
    GROUP_SCALES,
    WEIGHTS_FILE,
    packed_codes,
    quantized_tensor,
)
from quantizer.nn.network import Network
from quantizer.numerics.formats import has_minimum
from quantizer.plugins import plugin_steps
from quantizer.storage.files import deferred_shards
from quantizer.storage.opened_files import OpenedFiles

_RESCALED = "rescaled.safetensors"
"""The file with the float parameters that algorithms have rescaled, by `<module>.<parameter>`.
With them, the float network computes the same as the model. Parameters that WEIGHTS_FILE has
with the same values are left out.
"""
TENSOR_FILES = (WEIGHTS_FILE, CORRECTIONS, GROUP_SCALES, _RESCALED)
_Parameters = dict[str, dict[str, Tensor]]
"""Parameters by layer and name."""


def tensors_of(network: Network, solution: Solution) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a solution, by file and name. Codes are packed."""
    modules = network.module_names
    weights = dict(network.state_dict())
    scales: dict[str, Tensor] = {}
    for (layer, role), tensor in solution.tensors.items():
        spec = tensor.spec
        module = modules[layer]
        if tensor.codes is not None:
            name = f"{module}.{parameter_name(role)}"
            weights[name] = packed_codes(tensor.codes, spec)
        # There are too many groups to list their scales in quant_info.json
        if spec.has_groups and not spec.is_dynamic:
            # Only scales of few bits need it
            from quantizer.numerics.two_level import pack_scales

            parts = pack_scales(tensor.scale, spec.scale_type)
            for part, values in parts.items():
                scales[f"{module}.{role}.{part}"] = values
            has_zero_point = spec.dtype == "int" and not spec.symmetric
            if has_zero_point or has_minimum(spec.dtype):
                scales[f"{module}.{role}.zero_point"] = tensor.zero_point
    rescaled: dict[str, Tensor] = {}
    for layer, parameters in solution.rescaled.items():
        replaced = solution.weights.get(layer, {})
        for key, parameter in parameters.items():
            # The same tensor is in WEIGHTS_FILE already
            if replaced.get(key) is not parameter:
                rescaled[f"{modules[layer]}.{key}"] = parameter
    files = {WEIGHTS_FILE: weights}
    if solution.corrections:
        files[CORRECTIONS] = dict(solution.corrections)
    if scales:
        files[GROUP_SCALES] = scales
    if rescaled:
        files[_RESCALED] = rescaled
    return files


def header_of(network: Network, solution: Solution) -> dict[str, Any]:
    """Return the entries of the header about what algorithms and finetuning have changed."""
    modules = network.module_names
    header: dict[str, Any] = {}
    header.update(solution.kept)
    replaced: dict[str, Any] = {}
    for layer in {*solution.weights, *solution.rescaled}:
        replaced[layer] = {
            "module": modules[layer],
            "weights": sorted(solution.weights.get(layer, ())),
            "rescaled": sorted(solution.rescaled.get(layer, ())),
        }
    insertions: list[dict[str, Any]] = []
    for insertion in solution.insertions:
        row = {**vars(insertion), "module": modules[insertion.name]}
        del row["weight"]
        insertions.append(row)
    header["replaced"] = replaced
    header["insertions"] = insertions
    header["algorithms"] = list(solution.algorithms.get("algorithms", ()))
    return header


def solution_of(
    opened: OpenedFiles, header: Mapping[str, Any], entries: Mapping[str, Any]
) -> Solution:
    """Return the solution in a result folder, its tensors deferred: the inverse of `tensors_of`
    and `header_of`.

    Args:
        opened: the files.
        header: of quant_info.json.
        entries: the tensors of quant_info.json, by layer and role.

    Raises:
        KeyError, TypeError, ValueError: something is missing.
    """
    files = {name: deferred_shards(name, opened) for name in TENSOR_FILES}
    stored = files[WEIGHTS_FILE]
    with_scales = {**stored, **files[GROUP_SCALES]}
    tensors = {}
    for layer, roles in entries.items():
        for role, entry in roles.items():
            tensors[layer, role] = quantized_tensor(entry, role, with_scales)
    insertions: list[Insertion] = []
    for row in header["insertions"]:
        insertion = Insertion(
            name=row["name"],
            op=row["op"],
            source=row["source"],
            readers=tuple(row["readers"]),
            weight=stored[f"{row['module']}.weight"],
            attrs=row["attrs"],
        )
        insertions.append(insertion)
    replaced = header["replaced"]
    steps = [step.keeps for step in plugin_steps()]
    kept = {name: header[name] for name in steps if header.get(name)}
    return Solution(
        tensors,
        weights=_parameters(replaced, "weights", stored),
        corrections=files[CORRECTIONS],
        insertions=tuple(insertions),
        rescaled=_parameters(replaced, "rescaled", {**stored, **files[_RESCALED]}),
        kept=kept,
    )


def _parameters(
    replaced: Mapping[str, Any], kind: str, tensors: Mapping[str, Tensor]
) -> _Parameters:
    """Return parameters by layer and name.

    Args:
        replaced: the entry of the header with the names of parameters, by layer and kind.
        kind: "weights" or "rescaled".
        tensors: by `<module>.<parameter>`.
    """
    parameters: _Parameters = {}
    for layer, row in replaced.items():
        for key in row[kind]:
            tensor = tensors[f"{row['module']}.{key}"]
            parameters.setdefault(layer, {})[key] = tensor
    return parameters
