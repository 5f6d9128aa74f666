"""A layer's weight by its channels, one view for all kinds of linear and convolution layers."""

from __future__ import annotations

from torch import Tensor

from quantizer.graph.ir import Node


def by_channel(node: Node, weight: Tensor) -> Tensor:
    """The weight of a linear or convolution layer as [groups, a group's outputs, its inputs, taps]; often a view."""
    groups = int(node.attrs.get("groups", 1))
    table = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], weight.shape[2:].numel())
    return table.transpose(1, 2) if node.row.transposed else table


def rescaled(node: Node, weight: Tensor, outputs: Tensor | None = None, inputs: Tensor | None = None) -> Tensor:
    """The weight with each output and each input channel multiplied by a factor; computed in the factors' dtype."""
    table = by_channel(node, weight)
    for factor, shape in ((outputs, (len(table), -1, 1, 1)), (inputs, (len(table), 1, -1, 1))):
        if factor is not None:
            table = table * factor.to(weight.device).reshape(shape)
    table = table.transpose(1, 2) if node.row.transposed else table
    return table.reshape(weight.shape).to(weight.dtype)
