"""What algorithms and finetuning replaced, in the result folder: a header's entries and the tensors beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quantizer.engine.insertions import described, insertion
from quantizer.engine.result_files import read_tensors
from quantizer.engine.solution import Solution
from quantizer.nn.network import Network

WEIGHTS = "weights.safetensors"
RESCALED = "rescaled.safetensors"
"""Float parameters that are as good as the model's, by `<module>.<parameter>`, where `WEIGHTS` has rounded ones."""


def header_of(network: Network, found: Solution) -> dict[str, Any]:
    """The header's entries; their tensors are in `WEIGHTS`, those of `float_tensors` in `RESCALED`."""
    modules = network.module_names
    return {
        "replaced_weights": {
            name: {"module": modules[name], "tensors": sorted(own)} for name, own in found.weights.items()
        },
        "rescaled": {name: sorted(own) for name, own in found.rescaled.items()},
        "insertions": [{**described(row), "module": modules[row.name]} for row in found.insertions],
        "algorithms": list(found.algorithms.get("algorithms", ())),
    }


def float_tensors(network: Network, found: Solution) -> dict[str, Tensor]:
    """The rescaled parameters that something else took the place of."""
    return {
        f"{network.module_names[name]}.{key}": tensor
        for name, own in found.rescaled.items()
        for key, tensor in own.items()
        if found.weights[name][key] is not tensor
    }


def read_replaced(folder: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """`weights`, `rescaled` and `insertions` of a `Solution`.

    Raises KeyError or TypeError for what is not there.
    """
    replaced, inserted = header["replaced_weights"], header["insertions"]
    stored = read_tensors(folder / WEIGHTS) if replaced or inserted else {}
    floats = read_tensors(folder / RESCALED) if RESCALED in header["files"] else {}
    paths = {name: {key: f"{entry['module']}.{key}" for key in entry["tensors"]} for name, entry in replaced.items()}
    return {
        "weights": {name: {key: stored[path] for key, path in own.items()} for name, own in paths.items()},
        "rescaled": {
            name: {key: floats.get(paths[name][key], stored[paths[name][key]]) for key in keys}
            for name, keys in header["rescaled"].items()
        },
        "insertions": tuple(insertion(row, stored[f"{row['module']}.weight"]) for row in inserted),
    }
