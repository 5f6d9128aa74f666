"""What algorithms and finetuning replaced, in the result folder: a header's entries and the tensors beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quantizer.config.roles import parameter_name
from quantizer.engine.insertions import described, insertion
from quantizer.engine.result_files import read_tensors
from quantizer.engine.solution import Solution
from quantizer.nn.network import Network
from quantizer.numerics.codes import pack

WEIGHTS = "weights.safetensors"
RESCALED = "rescaled.safetensors"
"""Float parameters that are as good as the model's, by `<module>.<parameter>`, where `WEIGHTS` has codes or others."""


def header_of(network: Network, found: Solution) -> dict[str, Any]:
    """The header's entries; their tensors are in `WEIGHTS`, those of `float_tensors` in `RESCALED`."""
    modules = network.module_names
    return {
        "replaced": {
            name: {
                "module": modules[name],
                "weights": sorted(found.weights.get(name, ())),
                "rescaled": sorted(found.rescaled.get(name, ())),
            }
            for name in sorted({*found.weights, *found.rescaled})
        },
        "insertions": [{**described(row), "module": modules[row.name]} for row in found.insertions],
        "algorithms": list(found.algorithms.get("algorithms", ())),
    }


def stored_parameters(network: Network, found: Solution) -> dict[str, Tensor]:
    """The parameters of the network by `<module>.<parameter>`; in the place of one that has codes these, packed."""
    codes = {
        f"{network.module_names[layer]}.{parameter_name(role)}": pack(tensor.codes, tensor.spec)
        for (layer, role), tensor in found.tensors.items()
        if tensor.codes is not None
    }
    return {**network.state_dict(), **codes}


def float_tensors(network: Network, found: Solution) -> dict[str, Tensor]:
    """The rescaled parameters that something else took the place of."""
    return {
        f"{network.module_names[name]}.{key}": tensor
        for name, own in found.rescaled.items()
        for key, tensor in own.items()
        if found.weights.get(name, {}).get(key) is not tensor
    }


def read_replaced(folder: Path, header: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """`weights`, `rescaled` and `insertions` of a `Solution`; `stored` is what `WEIGHTS` holds.

    Raises KeyError or TypeError for what is not there.
    """
    floats = {**stored, **(read_tensors(folder / RESCALED) if RESCALED in header["files"] else {})}
    return {
        **{
            kind: {
                name: {key: tensors[f"{entry['module']}.{key}"] for key in entry[kind]}
                for name, entry in header["replaced"].items()
                if entry[kind]
            }
            for kind, tensors in (("weights", stored), ("rescaled", floats))
        },
        "insertions": tuple(insertion(row, stored[f"{row['module']}.weight"]) for row in header["insertions"]),
    }
