"""The algorithms that a config may list, as frozen values: one class each, in the order in which they may stand.

An algorithm either rescales (the float function stays, weights and activations become easier to round) or rounds
(weights move onto their grids). Knows no tensors and no file's spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from quantizer.config.diagnostics import Place

Stage = Literal["rescale", "round"]


@dataclass(frozen=True)
class ScalingLayer:
    """One entry of `scaling_layers`, with names relative to a block: layers that read one value are scaled together.

    `prev_op` makes that value, `inp` is one of the layers whose input it is; an empty name means: found on the graph.
    """

    layers: tuple[str, ...]
    prev_op: str = ""
    inp: str = ""
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Names:
    """What a config says of the model's structure; None means that it is found on the graph.

    `blocks` is the module that holds the decoder's blocks, `inside` the layers of a block in the order in which they
    are settled, `scaling` the groups that are scaled together, `embeddings` are layers that must exist and no more.
    `places` has the file's place of each field that is set.
    """

    blocks: str | None = None
    inside: tuple[str, ...] | None = None
    scaling: tuple[ScalingLayer, ...] | None = None
    embeddings: tuple[str, ...] | None = None
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Algorithm:
    """What all have: the names that override the graph, the entry's path in the file, and its place."""

    names: Names = field(default_factory=Names, kw_only=True)
    label: str = field(default="", kw_only=True, compare=False)
    place: Place | None = field(default=None, kw_only=True, compare=False)

    name: ClassVar[str] = ""
    stage: ClassVar[Stage] = "round"
    needs_data: ClassVar[bool] = True


@dataclass(frozen=True)
class SmoothQuant(Algorithm):
    """`alpha` is one strength, several to choose from for each group, or "auto": 0, 0.1, …, 1."""

    alpha: float | tuple[float, ...] | Literal["auto"] = 0.5
    scale_clamp_min: float = 1e-3

    name = "smoothquant"
    stage = "rescale"


@dataclass(frozen=True)
class Rotation(Algorithm):
    """`residual` rotates what runs between the blocks, `values` each attention head, `online` the inputs of the layers
    that nothing else can rotate, by an operator of its own. `seed` draws the signs of the Hadamard matrices."""

    residual: bool = True
    values: bool = True
    online: bool = True
    seed: int = 0

    name = "rotation"
    stage = "rescale"
    needs_data = False


@dataclass(frozen=True)
class Awq(Algorithm):
    """`scale_search` finds factors of input channels, `clip_search` ranges of weights; `grid` is the number of steps
    of the first search."""

    scale_search: bool = True
    clip_search: bool = True
    grid: int = 20

    name = "awq"
    stage = "rescale"  # and it leaves clipped grids, which a rounding algorithm after it takes over


@dataclass(frozen=True)
class Gptq(Algorithm):
    """`damp_percent` of the mean diagonal is added to the Hessian; `desc_act` settles columns with large inputs first;
    `static_groups` finds the scales of groups before the first column is settled, which desc_act needs."""

    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    true_sequential: bool = True

    name = "gptq"


@dataclass(frozen=True)
class Gptaq(Gptq):
    """GPTQ that also makes up for the error of its inputs, by the share `alpha`."""

    alpha: float = 0.25

    name = "gptaq"


@dataclass(frozen=True)
class Qronos(Gptq):
    """GPTQ on columns that are fitted to the float network's outputs; damping is `alpha` of the largest eigenvalue."""

    alpha: float = 1e-3
    damp_percent: float = 0.0

    name = "qronos"


ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (SmoothQuant, Rotation, Awq, Gptq, Gptaq, Qronos)
}
