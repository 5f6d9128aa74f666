"""What algorithms want to know of a graph: decoder blocks, layers that read one value, and where a factor can go.

Found on the traced graph alone, for any architecture; a config may name parts of it. Computes nothing on weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModuleBlock:
    """A run of nodes that repeats: `path` is its module's, `start` and `stop` are indices into `graph.nodes`."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """Where each channel of a group's input can be divided by a factor, exactly: in the parameters of one layer.

    Args:
        kind: "norm" divides the parameters `weight` and, where there is one, `bias` of a normalization (or the factor
            of a decomposed one, a "parameter" or "constant" node); "layer" the rows of a linear or convolution layer
            and its bias.
        node: whose parameters are divided.
        channels: for each channel of the group's input the output channel of `node` that it comes from; None where
            they are the same. Channels with one origin must have one factor.
        offset: what is added to the parameter before it multiplies (1 for norms that keep weight - 1).
        extra: linear layers that read the same value and are not in the group: their columns are multiplied as well.
    """

    kind: Literal["norm", "layer"]
    node: str
    channels: tuple[int, ...] | None = None
    offset: float = 0.0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputGroup:
    """Layers with weights that multiply one value.

    Args:
        source: the node whose value they read.
        layers: linear and convolution layers in execution order; an algorithm rounds those that the plan quantizes.
        axis: of the value, along which its channels lie (-1 for linear layers).
        channels: how many there are.
        block: index into `Structure.blocks`; None outside.
        fold: None where only an explicit multiplication is exact; `why_not` says why.
        tied: nodes outside the group that have the weight of one of its layers: other columns need a copy of their own.
    """

    source: str
    layers: tuple[str, ...]
    axis: int
    channels: int
    block: int | None = None
    fold: Fold | None = None
    why_not: str = ""
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Structure:
    """Blocks and groups in execution order. A layer is in one group at most."""

    blocks: tuple[ModuleBlock, ...]
    groups: tuple[InputGroup, ...]
