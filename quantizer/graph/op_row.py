"""What a row of the table of operators (`ops`) says."""

from dataclasses import dataclass
from typing import Literal

from quantizer.graph.axis_rules import AxisRule, Commutes

Kind = Literal[
    "mac",
    "compute",
    "fusable",
    "nonlinear",
    "join",
    "passthrough",
    "structural",
    "float",
    "unknown",
]
# mac          multiplies and accumulates; on integer hardware its inputs must be integers as
# well as its output compute      makes new values; its output is quantized fusable      an
# activation that hardware applies before writing the producer's output: one quantization for
# both nonlinear    an activation of its own: quantized unless it is what the network returns
# join         puts values of several tensors into one and computes nothing: each keeps its
# quantization passthrough  moves or selects values, so that they keep the scale of its input
# structural   inputs, parameters, constants, sizes and integers: nothing to quantize float
# known, and computed in float on purpose: few bits of what it makes say too little (roots,
# exponentials)


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Args:
        name: canonical.
        kind: how it behaves towards quantization.
        types: the classes and functions that users may name.
        aten: the packets that torch traces it as; none for a layer of this package.
        axes: where the channels of what it reads are in what it makes; None where they mix.
        commutes: what may be done to these channels before it or after it, alike.
        weight: whether it has a weight to quantize.
        owns: whether parameters that it is called with are its own, though they stay float.
        channels: the axis, in what it makes, that its own weight is about.
        spatial: how many axes the kernel of a linear or convolution layer has; None for other
            operators.
        transposed: whether its weight is [inputs, outputs, *kernel] instead of [outputs,
            inputs, *kernel].
        experts: whether its weight is a stack of matrices, one below the other, each for tokens
            of its own.
        rectifies: whether it is max(x, 0).
        cuts: whether it cuts off values and leaves the others as they are.
        normalizes: whether it brings the last axis, a transformer's channels, to one size.
        nonzero: the argument that must not become zero, as it is divided by, or its logarithm
            taken.
        exact: the arguments of which a small error makes another value: angles, what is rounded
            to integers, places.
        fresh: whether the output shares no memory with an input.
        any_layout: whether it computes on any order of memory alike, and makes images of the
            order of those it reads.
        shape_of: the argument of which it reads the shape alone.
        joins: the arguments whose values a join puts into its output, later ones over earlier
            ones.
        unwritten: whether what it makes is memory that nobody has written.
        orders: whether it puts rows in the order of their values; its last result says which
            row each was.
    """

    name: str
    kind: Kind
    types: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    axes: AxisRule | None = None
    commutes: Commutes = Commutes.NOTHING
    weight: bool = False
    owns: bool = False
    channels: int | None = None
    spatial: int | None = None
    transposed: bool = False
    experts: bool = False
    rectifies: bool = False
    cuts: bool = False
    normalizes: bool = False
    nonzero: str | None = None
    exact: tuple[str, ...] = ()
    fresh: bool = False
    any_layout: bool = False
    shape_of: str | None = None
    joins: tuple[str, ...] = ()
    unwritten: bool = False
    orders: bool = False

    @property
    def is_linear_or_convolution(self) -> bool:
        """Whether it multiplies channels with a weight that has its outputs and inputs as
        axes.
        """
        return self.spatial is not None

    @property
    def scales_channels(self) -> bool:
        """Whether it multiplies each channel with a weight of its own."""
        return (
            self.kind == "mac"
            and self.channels is not None
            and self.spatial is None
            and not self.experts
        )

    @property
    def looks_up(self) -> bool:
        """Whether it makes rows of its own weight, as an embedding does."""
        return self.weight and self.kind == "compute"

    @property
    def reads_values(self) -> bool:
        """Whether what it makes depends on values that it reads, and not on their shape
        alone.
        """
        return self.kind != "structural" or not self.aten

    @property
    def keeps_scale(self) -> bool:
        """Whether what it makes needs no other scale than what it reads."""
        return self.kind == "passthrough" or self.rectifies

    @property
    def only_moves(self) -> bool:
        """Whether it moves values, all alike; a maximum chooses among them."""
        return self.kind == "passthrough" and Commutes.ROTATIONS in self.commutes
