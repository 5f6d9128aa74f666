"""Algorithms that do next to nothing, for tests of what is around algorithms."""

from __future__ import annotations

from dataclasses import replace

import torch

from quantizer.config.algorithms import AlgoConfig
from quantizer.graph.edits import Insertion
from quantizer.layerwise.adjustment import (
    Adjustment,
    Remark,
    RoundedWeight,
    Task,
    apply_adjustment,
)
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.layerwise.sequential_runner import SequentialRunner
from quantizer.nn.network import Network

SOLVED: list[str] = []
"""Layers that `coarse` has rounded since a test cleared it."""


def doubled(task: Task, settings: AlgoConfig, found: Adjustment) -> Adjustment:
    """Inputs of each group times powers of two, by a norm before them or explicitly; columns of
    weights divided.
    """
    for group in task.structure.groups:
        graph = apply_adjustment(task.graph, found)
        factors = 2.0 ** (torch.arange(group.channels) % 3 - 1)
        for layer in group.layers:
            node = graph.by_name[layer]
            shape = [1, -1] + [1] * (graph.tensors[node.params["weight"]].dim() - 2)
            found = found.with_parameters(
                layer, weight=graph.tensors[node.params["weight"]] / factors.view(shape)
            )
        fold = group.fold
        if fold is not None and fold.kind == "norm" and not fold.offset:
            node = graph.by_name[fold.node]
            own = {
                key: graph.tensors[node.params[key]] * factors
                for key in ("weight", "bias")
                if key in node.params
            }
            found = found.with_parameters(fold.node, **own)
        else:
            name = f"{group.layers[0].rpartition('/')[0]}/input_scale"
            row = Insertion(
                name, "input_scale", group.source, group.layers, factors, {"axis": group.axis}
            )
            found = replace(found, insertions=(*found.insertions, row))
    return found


def coarse(task: Task, settings: AlgoConfig, found: Adjustment) -> Adjustment:
    """Round-to-nearest with scales twice as large, group by group on the network that is
    rounded so far.
    """
    graph = apply_adjustment(task.graph, found)
    runner = SequentialRunner(Network(graph), task.batches())
    for number, group in enumerate(task.structure.groups):
        runner.advance(group.source)
        for name in group.layers:
            if (name, "weights") not in task.specs:
                continue
            if number >= task.done:
                found = found.with_rounded({name: _rounded(task, name, runner)})
                SOLVED.append(name)
            runner.network.layers[name].get_parameter("weight").data = found.rounded[
                name
            ].weight
        if number >= task.done:
            if group.block is None:
                found = found.with_remarks(
                    Remark(group.layers[0], "it is in no block", is_warning=False)
                )
            task.after_group(found, number + 1)
    return found


def _rounded(task: Task, name: str, runner: SequentialRunner) -> RoundedWeight:
    spec, weight = (
        task.specs[name, "weights"],
        runner.network.layers[name].get_parameter("weight").detach(),
    )
    qparams = nearest_qparams(spec, weight)
    qparams = replace(qparams, scale=qparams.scale * 2)
    return RoundedWeight(nearest(weight, spec, qparams), qparams, 0.5, 0.25)
