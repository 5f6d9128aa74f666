"""Calibrated toys to deploy: each floating-point value on a code_range of its own range,
weights per channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporting import export
from quantizer.export.targets import EXPORTERS
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.formats import IntegerRange
from quantizer.numerics.qparams import qparams_from_range
from support.toys import built, traced

PHONES = ["executorch", "litert"]
"""The targets with int8 kernels only, which refuse other plans."""
FILES = [
    target
    for target, row in EXPORTERS.items()
    if not row.for_transformers and target not in PHONES
]
"""The targets of `--deploy` that take any network; others take models of transformers."""
ACTIVATION = QuantizationSpec()
WEIGHTS = QuantizationSpec(qscheme="per_channel", ch_axis=0)
WIDEST_IN_INT8 = 8 if torch.cpu._is_vnni_supported() else 7
"""The bits of int8 weights whose products this processor adds up right."""


@dataclass(frozen=True)
class Written:
    """A file of a deployed network."""

    given: Deployment
    path: Path
    found: Verification


def written(target: str, name: str, folder: Path) -> Written:
    """A toy as a file in the folder; its batch is of two where the code fixes it."""
    weights = WEIGHTS
    if target == "openvino":
        weights = replace(WEIGHTS, bit_width=WIDEST_IN_INT8)
    given = deployment(name, 2 if name == "static_batch" else 3, weights)
    path = folder / f"{name}.{target}"
    return Written(given, path, export(target, given, path))


def deployment(name: str, batch: int = 3, weights: QuantizationSpec = WEIGHTS) -> Deployment:
    """A toy quantized to integers, with a call of `batch` samples."""
    toy = built(name)
    args, kwargs = toy.call(batch)
    solution = calibrated(traced(name), args, kwargs, weights=weights)
    return Deployment(traced(name), solution, args, kwargs)


def outputs_of(given: Deployment) -> list[Tensor]:
    """The tensors of test mode's output for the deployment's call, in order."""
    with torch.no_grad():
        return tensor_leaves(given.reference(*given.args, **given.kwargs))


def calibrated(
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    activation: QuantizationSpec = ACTIVATION,
    weights: QuantizationSpec = WEIGHTS,
) -> Solution:
    """Every float value and weight of the graph with its spec, scale and zero point."""
    network = Network(graph)
    found: dict[Any, Any] = {}

    def watcher(name: str) -> Callable[[Tensor], None]:
        return lambda value: found.update({(name, "activation"): fitted(value, activation)})

    watched = [n.name for n in graph.nodes if n.dtype == torch.float32 and n.op != "parameter"]
    with torch.no_grad():
        network.observe(args, kwargs, {name: watcher(name) for name in watched})
    for node in graph.nodes:
        if node.row.weight and "weight" in node.params:
            found[node.name, "weights"] = fitted(network.layers[node.name].weight, weights)
    return Solution(found)


def fitted(value: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    """With the scale and zero point that cover a tensor."""
    code_range = IntegerRange(spec.quant_min, spec.quant_max, spec.symmetric, spec.scale_type)
    if spec.ch_axis is None:
        low, high = value.min(), value.max()
    else:
        rest = [axis for axis in range(value.ndim) if axis != spec.ch_axis]
        # No axes would mean all
        low, high = (value.amin(rest), value.amax(rest)) if rest else (value, value)
    return QuantizedTensor(spec).with_qparams(qparams_from_range(low, high, code_range))
