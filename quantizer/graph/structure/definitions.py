"""What algorithms need to know of a graph: decoder blocks, layers that read the same value, and
where a factor can be folded. Then the channels of a value are divided exactly.

It follows from the traced graph alone, for any architecture, by following channels through it.
A config may name parts of it. Nothing is computed on weights.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModuleBlock:
    """A run of nodes that repeats.

    Args:
        path: of its module.
        start: the index of its first node in `graph.nodes`.
        stop: the index after its last node.
    """

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """A layer in whose parameters each channel of a group's input can be divided by a factor,
    exactly.

    Args:
        kind: "norm" divides the parameters `weight` and `bias` of a normalization, or the
            factor of a decomposed one (a "parameter" or "constant" node). "layer" divides the
            rows of a linear or convolution layer, and its bias.
        node: whose parameters are divided.
        channels: for each channel of the group's input the output channel of `node` that it
            comes from; None where they are the same. Channels with one origin must have one
            factor.
        offset: what is added to the parameter before it multiplies (1 for norms that keep
            weight - 1).
        extra: linear layers outside the group that read the same value. Their columns are
            multiplied as well.
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
        layers: linear and convolution layers in execution order. An algorithm rounds those that
            the plan quantizes.
        axis: of the value, along which its channels are (-1 for linear layers).
        channels: how many there are.
        block: index into `Structure.blocks`; None outside.
        fold: None where only an explicit multiplication is exact.
        why_not: the reason why there is no fold.
        tied: nodes outside the group that have the weight of one of its layers: other columns
            need a copy of their own.
        is_fixed: whether its channels can be divided nowhere.
    """

    source: str
    layers: tuple[str, ...]
    axis: int
    channels: int
    block: int | None = None
    fold: Fold | None = None
    why_not: str = ""
    tied: tuple[str, ...] = ()
    is_fixed: bool = False


@dataclass(frozen=True)
class Structure:
    """Blocks and groups in execution order. A layer is in one group at most."""

    blocks: tuple[ModuleBlock, ...]
    groups: tuple[InputGroup, ...]
