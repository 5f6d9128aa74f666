"""Make rows of the table of operators: one function for each kind of row."""

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
    """A row; what computes makes fresh memory, but an einsum that only permutes returns a
    view.
    """
    fresh = (
        kind not in ("passthrough", "structural", "float", "unknown") and name not in _SEVERAL
    )
    derived = {"fresh": fresh, "any_layout": columns.get("axes") in ELEMENTWISE}
    return Op(name, kind, types, (name,) if aten is None else aten, **derived | columns)


def torch_ops(kind: Kind, *names: str, **columns: Any) -> tuple[Op, ...]:
    """Rows of functions that have no module and one name."""
    return tuple(make_op(name, kind, f"torch.{name}", **columns) for name in names)


def layer_op(name: str, spatial: int, *types: str, transposed: bool = False) -> Op:
    """A linear or convolution layer."""
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
    """A normalization whose weight and bias stay float."""
    return make_op(name, "compute", *types, owns=True, channels=channels, **columns)


def activation_op(name: str, kind: Kind, *types: str, **columns: Any) -> Op:
    """A function of each element."""
    return make_op(name, kind, *types, axes=SAME, **columns)


def pool_op(name: str, dims: int, kind: Kind, commutes: Commutes, *types: str) -> Op:
    """Windows over the last axes."""
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
    """Moves values and computes nothing."""
    return make_op(name, "passthrough", *types, axes=axes, commutes=ALL, **columns)


def join_op(name: str, *joins: str, **columns: Any) -> Op:
    """Puts the values of these arguments into one tensor."""
    return make_op(name, "join", f"torch.{name}", joins=joins, **columns)


ALL, AFFINE, LINEAR, SCALING = Commutes.ALL, Commutes.AFFINE, Commutes.LINEAR, Commutes.SCALING


ELEMENTWISE = (SAME, ALIKE, PRODUCT, QUOTIENT)


# They may return a view, or several tensors.
_SEVERAL = (
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
