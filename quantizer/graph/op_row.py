"""A row of the table of operators (`ops`), and builders of rows, one for each kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quantizer.graph.channels.axis_rules import (
    ALIKE,
    MOVED,
    PRODUCT,
    QUOTIENT,
    SAME,
    AxisRule,
    Commutes,
    over_last,
)

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
"""How an operator behaves towards quantization.

- `mac`: multiplies and accumulates. On integer hardware its inputs must be integers as well as
  its output.
- `compute`: makes new values, which are quantized.
- `fusable`: an activation that hardware applies before it writes the producer's output, so that
  both have one quantization.
- `nonlinear`: another activation. Its output is quantized unless the network returns it.
- `join`: puts values of several tensors into one and computes nothing. Each keeps its
  quantization.
- `passthrough`: moves or selects values, which keep the scale of its input.
- `structural`: inputs, parameters, constants, sizes and integers, which are not quantized.
- `float`: computed in float on purpose, because few bits of its output would not be enough
  (roots, exponentials).
- `unknown`: not in the table.
"""


_VARYING = ("input", "parameter", "module_input", "dequant_stub")
"""Structural operators whose values data or training decide."""
ALL = Commutes.ALL
AFFINE = Commutes.AFFINE
LINEAR = Commutes.LINEAR
SCALING = Commutes.SCALING
ELEMENTWISE = (SAME, ALIKE, PRODUCT, QUOTIENT)
_NOT_FRESH = (
    "einsum",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "quant_stub",
    "meshgrid",
    "broadcast_tensors",
)
"""Operators that may return a view, as an einsum that only permutes, or several tensors."""


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Args:
        name: canonical.
        kind: how it behaves towards quantization.
        types: the classes and functions that users may name.
        aten: the packets that torch traces it as; none for a layer of this package.
        axes: where the channels of its input are in its output; None where they mix.
        commutes: changes of these channels that have the same effect before and after it.
        weight: whether it has a weight to quantize.
        owns: whether the parameters of its call are its own, though they stay float.
        channels: the axis of its output that belongs to its own weight.
        spatial: how many axes the kernel of a linear or convolution layer has; None for other
            operators.
        transposed: whether its weight is [inputs, outputs, *kernel] instead of [outputs,
            inputs, *kernel].
        experts: whether its weight is a stack of matrices, one below the other, each for other
            tokens.
        rectifies: whether it is max(x, 0).
        cuts: whether it clips values and leaves the others as they are.
        saturates: the magnitude of inputs beyond which its output changes by less than 0.001,
            as a multiple of 127 and a power of two; None if there is none.
        normalizes: whether it normalizes the last axis, a transformer's channels.
        nonzero: the argument that must not become zero: a divisor, or that of a logarithm.
        exact: the arguments whose small errors change the result much: angles, what is rounded
            to integers, places.
        fresh: whether the output shares no memory with an input.
        any_layout: whether it computes the same for any memory format, and returns images in
            the format of its input.
        shape_of: the argument of which it reads only the shape.
        joins: the arguments whose values a join puts into its output, later ones over earlier
            ones.
        unwritten: whether its output is memory that nothing has written.
        orders: whether it orders rows by their values; its last result is the former place of
            each row.
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
    saturates: float | None = None
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
        """Return whether its weight has its output and input channels as axes."""
        return self.spatial is not None

    @property
    def scales_channels(self) -> bool:
        """Return whether it multiplies each channel by a factor of its own."""
        return (
            self.kind == "mac"
            and self.channels is not None
            and self.spatial is None
            and not self.experts
        )

    @property
    def looks_up(self) -> bool:
        """Return whether it looks up rows of its own weight, as an embedding does."""
        return self.weight and self.kind == "compute"

    @property
    def is_constant(self) -> bool:
        """Return whether it has the same values for any data and training, or sizes."""
        return self.kind == "structural" and self.name not in _VARYING

    @property
    def reads_values(self) -> bool:
        """Return whether its output depends on values that it reads, not only on their
        shape.
        """
        return self.kind != "structural" or not self.aten

    @property
    def keeps_scale(self) -> bool:
        """Return whether its output can have the scale of its input."""
        return self.kind == "passthrough" or self.rectifies

    @property
    def only_moves(self) -> bool:
        """Return whether it moves any values; a maximum chooses among them."""
        return self.kind == "passthrough" and Commutes.ROTATIONS in self.commutes


def make_op(
    name: str, kind: Kind, *types: str, aten: tuple[str, ...] | None = None, **columns: Any
) -> Op:
    """Return a row.

    Args:
        name: of the operator.
        kind: how it behaves towards quantization.
        types: the classes and functions that users may name.
        aten: the packets that torch traces; its name if they are None.
        columns: further columns. `fresh` and `any_layout` have defaults by the kind.
    """
    is_fresh = kind not in ("passthrough", "structural", "float", "unknown")
    derived = {
        "fresh": is_fresh and name not in _NOT_FRESH,
        "any_layout": columns.get("axes") in ELEMENTWISE,
    }
    packets = (name,) if aten is None else aten
    return Op(name, kind, types, packets, **derived | columns)


def torch_ops(kind: Kind, *names: str, **columns: Any) -> tuple[Op, ...]:
    """Return rows of functions that have no module and one name."""
    return tuple(make_op(name, kind, f"torch.{name}", **columns) for name in names)


def layer_op(name: str, spatial: int, *types: str, transposed: bool = False) -> Op:
    """Return the row of a linear or convolution layer."""
    return make_op(
        name,
        "mac",
        *types,
        weight=True,
        channels=-1 - spatial,
        spatial=spatial,
        transposed=transposed,
    )


def norm_op(name: str, channels: int, *types: str, **columns: Any) -> Op:
    """Return the row of a normalization whose weight and bias stay float."""
    return make_op(name, "compute", *types, owns=True, channels=channels, **columns)


def activation_op(name: str, kind: Kind, *types: str, **columns: Any) -> Op:
    """Return the row of a function of each element."""
    return make_op(name, kind, *types, axes=SAME, **columns)


def pool_op(name: str, dims: int, kind: Kind, commutes: Commutes, *types: str) -> Op:
    """Return the row of an operator on windows over the last axes."""
    return make_op(
        name,
        kind,
        *types,
        axes=over_last(dims),
        commutes=commutes,
        fresh=True,
        any_layout=dims == 2,
    )


def pool_ops(name: str, module: str, kind: Kind, commutes: Commutes) -> Iterator[Op]:
    """Yield the rows of such an operator and its modules for the last one, two and three
    axes.
    """
    for dims in (1, 2, 3):
        types = (f"torch.nn.{module}{dims}d", f"torch.nn.functional.{name}{dims}d")
        yield pool_op(f"{name}{dims}d", dims, kind, commutes, *types)


def move_op(name: str, *types: str, axes: AxisRule = MOVED, **columns: Any) -> Op:
    """Return the row of an operator that moves values and computes nothing."""
    return make_op(name, "passthrough", *types, axes=axes, commutes=ALL, **columns)


def join_op(name: str, *joins: str, **columns: Any) -> Op:
    """Return the row of an operator that puts the values of some arguments into one tensor."""
    return make_op(name, "join", f"torch.{name}", joins=joins, **columns)
