"""Builders of rows of the table of operators, one for each kind of row."""

from typing import Any

from quantizer.graph.axis_rules import (
    ALIKE,
    MOVED,
    PRODUCT,
    QUOTIENT,
    SAME,
    AxisRule,
    Commutes,
    over_last,
)
from quantizer.graph.op_row import Kind, Op


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


def move_op(name: str, *types: str, axes: AxisRule = MOVED, **columns: Any) -> Op:
    """Return the row of an operator that moves values and computes nothing."""
    return make_op(name, "passthrough", *types, axes=axes, commutes=ALL, **columns)


def join_op(name: str, *joins: str, **columns: Any) -> Op:
    """Return the row of an operator that puts the values of some arguments into one tensor."""
    return make_op(name, "join", f"torch.{name}", joins=joins, **columns)


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
