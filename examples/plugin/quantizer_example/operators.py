"""An operator of this package, and its row in the table of operators."""

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import SAME, Commutes
from quantizer.graph.op_row import Op


@torch.library.custom_op("example::bend", mutates_args=())
def bend(x: Tensor) -> Tensor:
    """Return a quarter of negative values, and the others as they are."""
    return torch.where(x > 0, x, x / 4)


bend.register_fake(torch.empty_like)

ROWS = (
    Op(
        "bend",
        "fusable",
        ("quantizer_example.operators.bend",),
        ("example_bend",),
        axes=SAME,
        commutes=Commutes.SCALING,
        fresh=True,
    ),
)
