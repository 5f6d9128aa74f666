"""How far the outputs of layers with other weights are off, from the Gram matrices of their
inputs. Rounds nothing.
"""

import torch
from torch import Tensor

POWERS = 2
"""Steps of the power method towards a direction that need not be the leading one."""
TILE = 256
"""Columns of a symmetric matrix that are multiplied at once; what is above its diagonal tiles
is not read.
"""


def output_error(gram: Tensor, difference: Tensor) -> float:
    """Squared error of a layer's outputs, summed over the inputs of which `gram` is the Gram
    matrix: tr(d H d^T).

    Args:
        gram: [groups, depth, depth].
        difference: of two weights, [groups, rows, depth].

    >>> import torch
    >>> output_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]))
    14.0
    """
    wide, found = torch.promote_types(difference.dtype, torch.float64), 0.0
    for start in range(0, difference.shape[2], TILE):
        here, later = difference[..., start : start + TILE], difference[..., start + TILE :]
        columns = gram[..., start : start + TILE]
        products = here @ columns[:, start : start + TILE]
        products.baddbmm_(later, columns[:, start + TILE :], alpha=2)
        found += float(products.mul_(here).sum(-1).sum(dtype=wide))
    return found


def estimated_error(gram: Tensor, difference: Tensor, stride: int) -> float:
    """About `output_error`, from every `stride`-th row and what all rows make of the inputs'
    largest direction.

    With h = H u, tr(d H d^T) is |d h|^2 / u h, which costs next to nothing, and a rest,
    whatever u is. Rows differ less in the rest, as one direction often has most of the energy.

    Args:
        gram: positive semidefinite, [groups, depth, depth].
        difference: of two weights, [groups, rows, depth].
        stride: with 1 there is nothing to estimate.

    Source: Sun et al. 2024, "Massive Activations in Large Language Models", for that direction.

    >>> import torch
    >>> estimated_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 2)
    10.0
    """
    u = leading(gram, POWERS)
    h = gram @ u
    shares = (difference @ h).double().square() / (u.double() * h.double()).sum(
        1, keepdim=True
    ).clamp(min=1e-300)
    some = difference[:, ::stride]
    rest = max(output_error(gram, some) - float(shares[:, ::stride].sum()), 0.0)
    return float(shares.sum()) + rest * difference.shape[1] / some.shape[1]


def leading(gram: Tensor, steps: int) -> Tensor:
    """About the leading eigenvector of each symmetric matrix [..., depth, depth], as a column
    times its eigenvalue.

    >>> import torch
    >>> leading(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 30).round().tolist()
    [[2.0], [0.0]]
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    vector = (diagonal + diagonal.mean(-1, keepdim=True))[..., None]
    for _ in range(steps):
        vector = gram @ (vector / vector.norm(dim=-2, keepdim=True).clamp(min=1e-30))
    return vector
