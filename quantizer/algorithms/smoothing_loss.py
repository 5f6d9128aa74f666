"""What quantization costs a group's outputs once its input channels are rescaled: by that, alphas compete."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment, Task
from quantizer.algorithms.channel_ranges import ChannelRanges
from quantizer.algorithms.fold import parameter
from quantizer.algorithms.patches import weight_matrix
from quantizer.algorithms.round_to_nearest import nearest, nearest_qparams
from quantizer.algorithms.row_sample import sampled_rows
from quantizer.config.model import CAST_ONLY, QuantizationSpec
from quantizer.graph.structure import InputGroup
from quantizer.graph.weights import rescaled
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.qparams import QParams, qparams_from_range
from quantizer.observers import code_range_of


def input_spec(task: Task, layer: str) -> QuantizationSpec | None:
    """How the value that a layer reads is quantized: at the layer itself, or where the value was made."""
    own = task.specs.get((layer, "input"))
    node = task.graph.by_name[layer]
    while own is None:
        source = next(iter(node.refs()), None)
        if source is None:
            return None
        own, node = task.specs.get((source, "activation")), task.graph.by_name[source]
        if own is None and node.row.kind != "passthrough":
            return None
    return own


def smoothing_loss(task: Task, group: InputGroup, seen: ChannelRanges, found: Adjustment, factors: Tensor) -> float:
    """Squared error of the group's outputs on the sample, its inputs divided by the factors, and all quantized."""
    total = 0.0
    rows = sum(len(parameter(task.graph, found, name)) for name in group.layers)
    for name in group.layers:
        node, spec = task.graph.by_name[name], task.specs.get((name, "weights"))
        weight, share = parameter(task.graph, found, name).float(), 1.0
        if spec is not None:
            weight, share = sampled_rows(weight, spec, node, rows)
        scaled = rescaled(node, weight, inputs=factors)
        quantized = scaled if spec is None else _quantized_weight(scaled, spec)
        inputs = seen.sample(name)
        by_input = factors.view(len(inputs), 1, -1).repeat_interleave(inputs.shape[2] * len(inputs) // len(factors), 2)
        rounded = _quantized_input(inputs / by_input, input_spec(task, name), seen, factors)
        outputs = inputs @ weight_matrix(seen.layers[name], weight).mT
        total += share * float(
            (rounded @ weight_matrix(seen.layers[name], quantized).mT - outputs).square_().sum(dtype=torch.float64)
        )
    return total


def _quantized_weight(weight: Tensor, spec: QuantizationSpec) -> Tensor:
    if spec.dtype in CAST_ONLY:
        return TensorQuantizer(spec)(weight)  # type: ignore[no-any-return]
    return nearest(weight, spec, nearest_qparams(spec, weight))


def _quantized_input(x: Tensor, spec: QuantizationSpec | None, seen: ChannelRanges, factors: Tensor) -> Tensor:
    """Rows of inputs [groups, samples, depth] with the scale that calibration would find, or with that of each row."""
    if spec is None:
        return x
    if not spec.is_scaled:
        return TensorQuantizer(spec)(x)  # type: ignore[no-any-return]
    if spec.is_dynamic and spec.qscheme != "per_tensor":
        by_row = dataclasses.replace(spec, qscheme="per_group" if spec.group_size else "per_token", ch_axis=2)
        return TensorQuantizer(by_row)(x)  # type: ignore[no-any-return]
    low, high = seen.low / factors, seen.high / factors
    if spec.qscheme == "per_channel":
        qparams = qparams_from_range(low, high, code_range_of(spec))
        by_input = [
            each.view(len(x), -1).repeat_interleave(x.shape[2] * len(x) // len(low), 1)
            for each in (qparams.scale, qparams.zero_point)
        ]
        wide = x.transpose(0, 1).flatten(1)
        placed = nearest(wide, dataclasses.replace(spec, ch_axis=1), QParams(*(each.flatten() for each in by_input)))
        return placed.view(x.shape[1], len(x), -1).transpose(0, 1)
    whole = dataclasses.replace(spec, qscheme="per_tensor", ch_axis=None, group_size=None)
    return nearest(x, whole, qparams_from_range(low.amin(), high.amax(), code_range_of(whole)))
