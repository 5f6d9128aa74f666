"""The least and greatest value of each channel that a group of layers reads, and a sample of what they read."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quantizer.algorithms.gram import geometry, not_finite
from quantizer.algorithms.patches import channel_rows, patches
from quantizer.graph.structure import InputGroup
from quantizer.nn.network import Network
from quantizer.observers import NonFiniteError

SAMPLE = 512
"""Inputs of a layer that a search looks at: rows, or patches of a convolution."""


class ChannelRanges:
    """Takes in the value that a group reads, batch by batch.

    Attributes:
        layers: of the group, by name.
        low, high: float32 [channels].
        tokens: how many there were.
    """

    def __init__(self, network: Network, group: InputGroup, *, with_sample: bool) -> None:
        self._group, self.tokens = group, 0
        device = network.layers[group.layers[0]].get_parameter("weight").device
        self.low = torch.full((group.channels,), math.inf, device=device)
        self.high = -self.low
        self.layers = {name: network.layers[name] for name in group.layers}
        kinds = {geometry(layer): layer for layer in self.layers.values()}
        self._samples = {kind: _Sample(layer) for kind, layer in kinds.items()} if with_sample else {}

    @property
    def size(self) -> Tensor:
        """The largest magnitude of each channel."""
        return torch.maximum(-self.low, self.high)

    def sample(self, layer: str) -> Tensor:
        """Some of a layer's inputs, evenly over the batches: [groups, at most SAMPLE, depth]."""
        return self._samples[geometry(self.layers[layer])].rows()

    def add(self, x: Tensor) -> None:
        """Take in one batch.

        Raises:
            DataError: it is not finite; the layer is named.
        """
        if x.numel() == 0:
            return
        low, high = _extremes(x, self._group.axis)
        if not math.isfinite(low.sum()) or not math.isfinite(high.sum()):
            error = NonFiniteError(int(x.isnan().sum()), int(x.isinf().sum()), x.numel())
            raise not_finite(self._group.layers[0], error)
        self.low, self.high = torch.minimum(self.low, low.float()), torch.maximum(self.high, high.float())
        self.tokens += x.numel() // self._group.channels
        for sample in self._samples.values():
            sample.add(x)


def _extremes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each index of an axis."""
    if axis % x.dim() == x.dim() - 1:
        rows = x.reshape(-1, x.shape[-1])
        return rows.amin(0), rows.amax(0)
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    return x.amin(others), x.amax(others)


class _Sample:
    """Every n-th row that a layer multiplies its weight with; n doubles when there are twice too many."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._stride, self._seen = layer, 1, 0
        self._kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        rows = self._rows_of(x)
        first = -self._seen % self._stride
        self._seen += rows
        at = torch.arange(first, rows, self._stride, device=x.device)
        if len(at):
            self._kept.append(patches(self._layer, x, at).float())
        while sum(part.shape[1] for part in self._kept) > 2 * SAMPLE:
            self._kept, self._stride = [torch.cat(self._kept, 1)[:, ::2]], 2 * self._stride

    def rows(self) -> Tensor:
        found = torch.cat(self._kept, 1)
        return found[:, :: -(-found.shape[1] // SAMPLE)]

    def _rows_of(self, x: Tensor) -> int:
        """How many rows the layer makes of a value."""
        if isinstance(self._layer, nn.Linear):
            return x.numel() // x.shape[-1]
        like = torch.empty_like(x, device="meta")
        weights = {name: tensor.to("meta") for name, tensor in self._layer.named_parameters()}
        return len(channel_rows(self._layer, torch.func.functional_call(self._layer, weights, (like,))))
